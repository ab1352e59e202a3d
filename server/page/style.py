"""The live page's style sheet: one set of names for colours, in light and dark."""

STYLE = """
:root { color-scheme: light dark;
  --ground: #ffffff; --panel: #f4f6f8; --ink: #17202a; --soft: #52606d; --line: #cbd2d9; --link: #0b4f9e;
  --whole: #dde3e9; --computed: #7fb0e6; --kept: #14508f; --cached: #9fb3c8; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #12161b; --panel: #1c232b; --ink: #e6ebf0; --soft: #a5b1bd; --line: #38434f; --link: #8cc4ff;
  --whole: #303a45; --computed: #3d6f9f; --kept: #8cc4ff; --cached: #5b6b7b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem 1.25rem 3rem;
  background: var(--ground); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: .25rem 1.25rem; }
h1 { font-size: 1.35rem; margin: 0; }
h2 { font-size: 1.05rem; margin: 1.75rem 0 .5rem; }
a { color: var(--link); }
nav { display: flex; flex-wrap: wrap; gap: 0 1rem; margin-left: auto; }
.soft, small { color: var(--soft); font-size: .87rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10.5rem, 1fr)); gap: .6rem;
  margin-top: 1rem; }
.tile, .card { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: .6rem .75rem; }
.tile b { display: block; font-size: 1.3rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .25rem .6rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
th { color: var(--soft); font-weight: 600; }
.pages td { text-align: left; white-space: normal; }
.pages td:first-child { white-space: nowrap; width: 6.5rem; }
.pages td:nth-child(2) { width: 45%; }
.bar { display: flex; height: .9rem; min-width: 6rem; background: var(--whole); border-radius: 3px;
  overflow: hidden; }
.bar i { display: block; height: 100%; }
.i-held { background: var(--kept); }
.i-used { background: var(--computed); }
.i-cached { background: var(--cached); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(21.5rem, 100%), 1fr)); gap: .75rem; }
.card p { margin: .2rem 0; }
.card .policy { overflow-wrap: anywhere; }
svg { display: block; margin: .4rem 0; max-width: 100%; height: auto; }
svg .whole { fill: var(--whole); }
svg .computed { fill: var(--computed); }
svg .kept { fill: var(--kept); }
svg .label { fill: var(--soft); font: 11px system-ui, sans-serif; text-anchor: end; }
.key { display: inline-block; width: .8rem; height: .8rem; margin: 0 .3rem 0 .4rem; border-radius: 2px;
  vertical-align: -1px; }
.whole-line { white-space: nowrap; }
.k-whole { background: var(--whole); }
.k-computed { background: var(--computed); }
.k-kept, .k-held { background: var(--kept); }
.k-cached { background: var(--cached); }
"""
