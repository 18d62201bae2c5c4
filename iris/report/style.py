"""The style of a page: light or dark as the reader's system is, for phones, screens and paper."""

from __future__ import annotations

from iris.report.palette import Palette

_RULES = """
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;scroll-padding-top:3.2rem}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 var(--font);
  --font:system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Liberation Sans","DejaVu Sans",sans-serif}
main,header,nav>div{max-width:1280px;margin:0 auto;padding:0 24px}
header{padding-top:40px;padding-bottom:20px}
h1{font-size:30px;line-height:1.2;font-weight:650;letter-spacing:-.015em;margin:0 0 8px}
h2{font-size:23px;font-weight:650;letter-spacing:-.01em;margin:56px 0 4px;padding-top:20px;
  border-top:2px solid var(--ink)}
h3{font-size:18px;font-weight:650;margin:40px 0 4px}
h3 code{font-size:1em}
h4{font-size:13px;font-weight:600;color:var(--muted);margin:26px 0 8px}
p{margin:4px 0 12px;max-width:78ch}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.92em}
a{color:inherit;text-decoration-color:var(--muted);text-underline-offset:3px}
a:hover{text-decoration-color:currentColor}
.lead,.note,figcaption{color:var(--muted)}
.note{font-size:13px;margin-bottom:8px}
.simulated{border-left:4px solid var(--loss);padding:6px 12px;margin:12px 0}
nav{position:sticky;top:0;z-index:2;background:var(--paper);border-bottom:1px solid var(--rule);font-size:14px}
nav>div{display:flex;gap:4px 20px;overflow-x:auto;white-space:nowrap;padding-top:9px;padding-bottom:9px}
.charts{display:grid;gap:28px 32px;align-items:start;
  grid-template-columns:repeat(auto-fill,minmax(min(100%,370px),1fr))}
.charts+.charts{margin-top:28px}
figure{margin:0;max-width:520px;break-inside:avoid}
figure svg{display:block;width:100%;height:auto}
figure svg *{stroke-linejoin:round;stroke-linecap:butt}
figure svg text{font-family:var(--font)!important;font-variant-numeric:tabular-nums;white-space:pre}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;list-style:none;margin:12px 0 0;padding:0;font-size:13px}
.key i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px;vertical-align:-1px}
.scroll{overflow-x:auto;margin:0 0 8px;--hint:color-mix(in srgb,var(--ink) 22%,transparent);background:
  linear-gradient(90deg,var(--paper) 30%,transparent) 0/36px 100% no-repeat local,
  linear-gradient(270deg,var(--paper) 30%,transparent) 100%/36px 100% no-repeat local,
  linear-gradient(90deg,var(--hint),transparent) 0/10px 100% no-repeat scroll,
  linear-gradient(270deg,var(--hint),transparent) 100%/10px 100% no-repeat scroll}
table{border-collapse:collapse;font-size:13px;line-height:1.35;font-variant-numeric:tabular-nums}
th,td{padding:3px 8px;text-align:right;white-space:nowrap;border-bottom:1px solid var(--rule)}
th:first-child,td:first-child{padding-left:2px}
th{font-weight:600;color:var(--muted);vertical-align:bottom;border-bottom-color:var(--muted)}
.l{text-align:left}
.w{white-space:normal;min-width:16em;max-width:60ch}
tbody tr:hover{background:color-mix(in srgb,var(--rule) 45%,transparent)}
tr:has(+.g) td{border-bottom-color:var(--muted)}
.best{font-weight:700}
.faster{color:var(--win)}
.slower,.wrong{color:var(--loss);font-weight:600}
details{margin:10px 0 18px}
summary{cursor:pointer;font-weight:600;padding:4px 0}
summary span{color:var(--muted);font-weight:400;margin-left:8px}
dl{display:grid;grid-template-columns:max-content 1fr;gap:6px 20px;font-size:14px;max-width:90ch}
dt{font-weight:600}dd{margin:0;color:var(--muted)}
footer{max-width:1280px;margin:48px auto 40px;padding:14px 24px 0;color:var(--muted);font-size:13px}
@media (max-width:640px){
  main,header,nav>div,footer{padding-left:16px;padding-right:16px}
  header{padding-top:24px}h1{font-size:25px}h2{font-size:20px;margin-top:44px}
  dl{grid-template-columns:1fr;gap:2px}dd{margin-bottom:8px}th,td{padding:3px 7px}
}
@media print{
  @page{size:A4 landscape;margin:12mm}
  body{font-size:10pt}nav{display:none}main,header,footer{max-width:none;padding:0}
  h2,h3,h4,summary,.note,.key{break-after:avoid}tr,dl{break-inside:avoid}thead{display:table-header-group}
  .charts{grid-template-columns:repeat(3,1fr);gap:14px 20px}.scroll{overflow:visible;background:none}
  table{font-size:7.5pt}th,td{padding:2px 5px}tbody tr:hover{background:none}
}
"""


def css(palette: Palette) -> str:
    """The whole style sheet. Paper is always light."""
    dark = f"@media screen and (prefers-color-scheme:dark){{:root{{{palette.css(dark=True)}}}}}"
    return f":root{{color-scheme:light dark;{palette.css(dark=False)}}}{dark}{_RULES}"
