// What is wrong with a kernel, in words for Python (tests/support/simt.py), each once.
//
// A line: kind|text|kernel|place|the other access's place, the last three as offsets into this library, 0 for
// none.
#pragma once

#include <string>

namespace simt {

void report(const std::string& kind, const std::string& text, void* pc, void* before = nullptr);

// What cannot go on: says it on stderr and ends the process.
[[noreturn]] void give_up(const std::string& text, void* pc = nullptr);

// An address of code as offset into this library, "0" for null.
std::string offset_of(const void* pc);

// The text stays until the next call.
const char* as_text(std::string text);

}  // namespace simt
