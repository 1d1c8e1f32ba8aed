"""Colours and style of HTML pages and charts: readable on light and dark screens and on paper."""

COLOURS = {
    "ground": ("#ffffff", "#14181d"),
    "panel": ("#f6f7f9", "#1c2229"),
    "ink": ("#1c2128", "#e6e9ed"),
    "soft": ("#5b6470", "#9aa4af"),
    "line": ("#dfe3e8", "#313943"),
    "bad": ("#c62828", "#ff7b72"),
    "alone": ("#6b7480", "#9aa4af"),
    "computed": ("#6b7480", "#9aa4af"),
    "tiered": ("#c9540a", "#f28a3c"),
    "gpu": ("#2f7ed8", "#5ba3f0"),
    "host": ("#b57a0c", "#e0a548"),
    "disk": ("#1b8f6f", "#34b38e"),
    "shared": ("#8a4fd0", "#b58af0"),
}
"""Colours of pages and charts, on light and on dark screens."""
LIGHT = {name: light for name, (light, _) in COLOURS.items()}
_LIGHT_VARIABLES = "".join(f"--{name}:{light};" for name, light in LIGHT.items())
_DARK_VARIABLES = "".join(f"--{name}:{dark};" for name, (_, dark) in COLOURS.items())

STYLE = (
    f":root{{color-scheme:light dark;{_LIGHT_VARIABLES}}}\n"
    f"@media (prefers-color-scheme:dark){{:root{{{_DARK_VARIABLES}}}}}"
    """
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"DejaVu Sans",sans-serif}
main{max-width:1180px;margin:0 auto;padding:40px 24px 64px}
h1,h2{overflow-wrap:anywhere}
h1{font-size:30px;line-height:1.25;margin:0 0 8px;font-weight:650;text-wrap:balance}
h2{font-size:20px;margin:44px 0 4px;font-weight:650}
h2.table{font-size:17px;margin-top:28px}
h3{font-size:16px;margin:0 0 6px;font-weight:650}
p{margin:6px 0 12px;max-width:85ch}
.soft,figcaption{color:var(--soft)}
.bad{color:var(--bad);font-weight:600}
.pictures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(480px,100%),1fr));gap:16px;margin:26px 0 8px}
figure{margin:0;padding:16px 14px 10px;background:var(--panel);border:1px solid var(--line);border-radius:10px}
figcaption{font-size:14px;padding:8px 4px 2px}
svg{display:block;width:100%;height:auto;max-width:680px}
svg text{font-family:system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif!important;
font-variant-numeric:tabular-nums}
figure:only-child{max-width:720px}
.wide{overflow-x:auto}
pre{background:var(--panel);border:1px solid var(--line);border-radius:10px;padding:14px 18px;overflow-x:auto;
font-size:14px}
table{border-collapse:collapse;margin:10px 0;font-variant-numeric:tabular-nums}
th,td{padding:6px 14px;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th:first-child,td:first-child{padding-left:4px}
.number{text-align:right;white-space:nowrap}
thead th{color:var(--soft);font-weight:600;vertical-align:bottom}
td.name{white-space:nowrap}
td{overflow-wrap:anywhere}
ul{padding-left:20px;max-width:85ch}li{margin:4px 0}
summary{cursor:pointer;margin:34px 0 6px;font-weight:600}
@media (max-width:640px){main{padding:20px 12px 40px}h1{font-size:23px}figure{padding:10px 4px 8px}
table{font-size:14px}th,td{padding:6px}th,td.name{white-space:normal!important}td:not(.number){min-width:9em}
td.name{overflow-wrap:normal}}
@media print{main{padding:0}figure,tr{break-inside:avoid}}
"""
)
