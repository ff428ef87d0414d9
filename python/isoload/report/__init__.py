"""Tables, pages and files of what was found."""
