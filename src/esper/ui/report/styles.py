"""The report's style sheet: light or dark as the reader prefers, for any width."""

CSS = """
:root{color-scheme:light dark;--paper:#ffffff;--ink:#1c2430;--soft:#5b6675;--line:#e3e7ed;--panel:#f6f8fa;
--policy:#0b63c5;--objective:#7f8fa6;--above:#187a3c;--below:#b3261e;--heat-rgb:11,99,197;
--germinated:#d7dce4;--training:#f3d98b;--blending:#f5b26b;--holding:#8fbdf0;--fossilized:#7fcf97;--pruned:#efb3ae;
--on-stage:#1c2430}
@media (prefers-color-scheme:dark){:root{--paper:#12161c;--ink:#e4e9f0;--soft:#98a4b5;--line:#2b333e;--panel:#1a2028;
--policy:#6db0ff;--objective:#7d8aa0;--above:#63cf8a;--below:#ff8a80;--heat-rgb:80,150,240;
--germinated:#5b6675;--training:#a58a33;--blending:#b8742b;--holding:#3d78bd;--fossilized:#2f8f4e;--pruned:#8c3f3a;
--on-stage:#ffffff}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,sans-serif}
main{max-width:1120px;margin:0 auto;padding:24px 16px 64px}
h1{font-size:1.5rem;margin:0}h2{font-size:1.2rem;margin:48px 0 8px}h4{font-size:.95rem;margin:0}
.answer{border-left:4px solid var(--policy);background:var(--panel);padding:12px 16px;margin:16px 0;
border-radius:0 6px 6px 0}
.answer strong{font-size:1.15rem;display:block}.answer p{margin:4px 0 0}
.facts{color:var(--soft);margin:4px 0 0;overflow-wrap:anywhere}
.note{color:var(--soft);font-size:.82rem;margin:0}
figure{margin:16px 0 24px;min-width:0}
figcaption{color:var(--soft);font-size:.88rem;margin-top:10px;max-width:80ch}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:0 40px}
.gauges{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,280px),1fr));gap:24px 28px}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,330px),1fr));gap:32px 36px}
svg{overflow:visible;display:block;font-size:12px}
svg.clip{overflow:hidden}
.plot{width:100%}
.grid{stroke:var(--line);stroke-width:1}
.zero{stroke:var(--soft);stroke-width:1}
.baseline{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:5 4}
.leader{stroke:var(--soft);stroke-width:1;opacity:.5}
.anomaly{stroke:var(--below);stroke-width:2}
text{fill:var(--ink)}.tick{fill:var(--soft);font-size:11px}
.start{text-anchor:start}.middle{text-anchor:middle}.end{text-anchor:end}
.curve{fill:none;stroke-width:2;vector-effect:non-scaling-stroke;stroke-linejoin:round}
.curve.policy{stroke:var(--policy);stroke-width:2.4}.curve.objective{stroke:var(--objective)}
.curve.raw{stroke:var(--objective);stroke-width:1;opacity:.45}
.dot,.whisker{stroke-width:2.2}
.dot.policy{fill:var(--policy)}.whisker.policy{stroke:var(--policy)}
.dot.other{fill:var(--soft)}.whisker.other{stroke:var(--soft)}
.dot.above{fill:var(--above)}.whisker.above{stroke:var(--above)}
.dot.below{fill:var(--below)}.whisker.below{stroke:var(--below)}
text.policy,th.policy{fill:var(--policy);color:var(--policy);font-weight:600}
b.above{color:var(--above)}b.below{color:var(--below)}text.above{fill:var(--above)}text.below{fill:var(--below)}
.origin{font-size:.82rem;margin-top:4px}.origin pre{margin:4px 0 0;white-space:pre-wrap}
.area{fill:var(--hue);stroke:var(--paper);stroke-width:1;vector-effect:non-scaling-stroke}
.bar{fill:var(--hue)}.curve.hue{stroke:var(--hue)}.swatch.hue{border-color:var(--hue);border-top-width:6px}
.hue0{--hue:#0072b2}.hue1{--hue:#d55e00}.hue2{--hue:#009e73}.hue3{--hue:#cc79a7}
.hue4{--hue:#e69f00}.hue5{--hue:#56b4e9}.hue6{--hue:#7f8fa6}.hue7{--hue:#b3a41f}
.legend{display:flex;flex-wrap:wrap;gap:4px 20px;font-size:.85rem;margin:0 0 12px}
.entry{display:inline-flex;align-items:center;gap:8px}
.swatch{width:22px;border-top:3px solid;display:inline-block}
.swatch.policy{border-color:var(--policy)}.swatch.objective{border-color:var(--objective)}
.swatch.raw{border-top-width:1px;border-color:var(--objective)}
i.stage{width:20px;height:18px;font:600 11px/18px system-ui,sans-serif;text-align:center;border-radius:3px;
color:var(--on-stage)}
.lane{fill:var(--panel)}
rect.stage{stroke:var(--paper);stroke-width:1}
.glyph{fill:var(--on-stage);font-size:10.5px;font-weight:600}.seed{font-size:11px}
rect.germinated{fill:var(--germinated)}i.germinated{background:var(--germinated)}
rect.training{fill:var(--training)}i.training{background:var(--training)}
rect.blending{fill:var(--blending)}i.blending{background:var(--blending)}
rect.holding{fill:var(--holding)}i.holding{background:var(--holding)}
rect.fossilized{fill:var(--fossilized)}i.fossilized{background:var(--fossilized)}
rect.pruned{fill:var(--pruned)}i.pruned{background:var(--pruned)}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px;text-align:left;border-bottom:1px solid var(--line)}
thead th{vertical-align:bottom}
th{font-weight:600}td small{color:var(--soft)}
.numbers td{white-space:nowrap}.numbers td.long{white-space:normal;min-width:9em}.numbers td small{display:block}
.dense th,.dense td{padding:5px 6px}
.heat td{text-align:center;background:rgba(var(--heat-rgb),var(--heat));padding:4px 8px;
line-height:1.25;white-space:nowrap}
.heat td small{display:block;font-size:.72rem;color:inherit;opacity:.75}
.upright{writing-mode:vertical-rl;transform:rotate(180deg);white-space:nowrap;font-weight:500}
pre{background:var(--panel);padding:12px;border-radius:6px;overflow-x:auto;font-size:.85rem}
summary{cursor:pointer;color:var(--soft)}
code{font-size:.92em;overflow-wrap:anywhere}
"""
