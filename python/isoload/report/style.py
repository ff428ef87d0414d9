"""The page's style: one column of text, two of charts; dark and light by the reader's setting; print in light."""

_LIGHT = """--paper:#fff;--ink:#1c2024;--soft:#60676f;--line:#e3e6ea;--tint:#f5f7f9;--accent:#0b6e5f;
--c0:#8a8f98;--c1:#3f7cc4;--c2:#0b8a76;--c3:#d98a29;--c4:#b3558f;--c5:#7a63c4;--c6:#5d8f2f;--c7:#c8553d;
--h0:#2f6db5;--h1:#74a3d6;--h2:#bcd3ec;--h3:#eef0f2;--h4:#fbdcbc;--h5:#f3ab68;--h6:#dc6f35;--h7:#a8321f;"""
_DARK = """--paper:#14171a;--ink:#e7eaed;--soft:#9aa3ac;--line:#2e343a;--tint:#1c2125;--accent:#4cc9b0;
--c0:#8d949d;--c1:#6aa5e8;--c2:#35c2a6;--c3:#e9a955;--c4:#d985ba;--c5:#a792ec;--c6:#93c763;--c7:#e87d66;
--h0:#6ba6ea;--h1:#3f75b3;--h2:#2b4a6d;--h3:#262b30;--h4:#5d4126;--h5:#9c6527;--h6:#dc8333;--h7:#ffb066;"""

STYLE = (
    f":root{{{_LIGHT}color-scheme:light dark}}@media screen and (prefers-color-scheme:dark){{:root{{{_DARK}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 -apple-system,"Segoe UI","Helvetica Neue",Arial,sans-serif}
main{max-width:1120px;margin:0 auto;padding:48px 24px 64px}
header{border-bottom:1px solid var(--line);padding-bottom:28px}
.kicker{margin:0;color:var(--soft);font-size:14px}
h1{margin:10px 0 12px;font-size:40px;line-height:1.15;letter-spacing:-.02em;color:var(--accent)}
.lead{margin:0 0 6px;max-width:68ch;font-size:18px}
section{margin-top:44px}
h2{margin:0 0 4px;font-size:22px;letter-spacing:-.01em}
h3{margin:0;font-size:16px}
.said,figcaption{margin:0 0 12px;color:var(--soft);font-size:14px;max-width:75ch}
figcaption{min-height:3.1em}
.grid{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:32px 40px;margin-top:16px}
.grid>:not(figure){grid-column:1/-1}
figure{margin:0;min-width:0;break-inside:avoid}
svg{display:block;max-width:100%;height:auto}
svg .mark-rect path{shape-rendering:crispEdges}
svg text{font-family:inherit;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:14px;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{padding:6px 14px 6px 0;text-align:right;border-bottom:1px solid var(--line)}
th:first-child{text-align:left}
th:last-child,td:last-child{padding-right:0}
thead th{color:var(--soft);font-weight:400;vertical-align:bottom;white-space:normal;max-width:7em}
thead th:first-child{max-width:none}
tbody th{font-weight:400}
.mark th,.mark td{font-weight:650}
details{margin-top:10px;font-size:14px}
summary{color:var(--soft);cursor:pointer;width:fit-content}
details .wide{max-height:360px;overflow:auto;margin-top:8px}
details table{font-size:12px}
pre{margin:8px 0 0;padding:14px 16px;background:var(--tint);border-radius:8px;overflow:auto;
font-size:13px;line-height:1.6;white-space:pre-wrap;overflow-wrap:anywhere}
details pre{max-height:480px}
:focus-visible{outline:2px solid var(--accent);outline-offset:3px}
@media (max-width:760px){main{padding:28px 16px 48px}h1{font-size:32px}.lead{font-size:17px}
.grid{grid-template-columns:minmax(0,1fr)}figcaption{min-height:0}section{margin-top:36px}
.cards thead{display:none}.cards table,.cards tbody{display:block}
.cards tr{display:grid;grid-template-columns:1fr 1fr;gap:2px 20px;padding:12px 0;border-bottom:1px solid var(--line)}
.cards th,.cards td{display:flex;justify-content:space-between;gap:8px;padding:0;border:0;font-size:13px}
.cards th{grid-column:1/-1;font-size:15px}.cards td::before{content:attr(data-of);color:var(--soft);font-weight:400}}
@media print{main{max-width:none;padding:0}.grid{gap:20px 28px}details{display:none}}
"""
)
