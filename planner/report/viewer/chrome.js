// Around the maps: the figures of one plan, the difference of two, the legend.
const MOST_SWATCHES = 60;

function showFigures(plan) {
  const { summary } = plan, list = document.getElementById("figures");
  const figure = label => [label, summary[label.replace(" ", "_") + "_bytes"]];
  const rows = ["arena", "lower bound", "resident", "extra", "naive"].map(figure);
  if (summary.formula_bytes) rows.splice(4, 0, ["max(S, 3X)", summary.formula_bytes.target]);
  for (const [label, n] of rows) {
    const row = make("div");
    row.append(make("dt", label), make("dd", size(n), { title: number(n) + " bytes" }));
    list.append(row);
  }
  const counts = make("div");
  counts.append(make("dd", counted(plan.count, "storage") + ", " + counted(plan.steps, "step")));
  list.append(counts);
}

function showDifference({ header: { difference }, maps }) {
  const head = make("tr"), top = make("thead"), body = make("tbody");
  const signed = (n, text) => (n > 0 ? "+" : "−") + text;
  const labels = maps.map(({ plan: { label } }) => make("th", shorten(label, 40), { title: label }));
  head.append(make("th", ""), ...labels, make("th", "difference"));
  top.append(head);
  for (const { label, before, after, unit } of difference.rows) {
    const row = make("tr"), show = unit === "bytes" ? size : number, change = after - before;
    let text = change ? signed(change, show(Math.abs(change))) : "none";
    const share = (100 * Math.abs(change) / before).toFixed(1);
    if (change && before && unit !== "step") text += " (" + signed(change, share) + " %)";
    row.append(make("th", label), make("td", show(before)), make("td", show(after)), make("td", text));
    body.append(row);
  }
  document.getElementById("differences").append(top, body);
  document.getElementById("gone").append(...difference.lines.map(line => make("p", line)));
  document.getElementById("difference").hidden = false;
}

/** The colours of the present mode. A ramp of very many groups has a swatch for several in a row. */
function showLegend(app) {
  const list = document.getElementById("legend"), { colours } = app, { groups, ramped, alone } = colours;
  const present = [...groups.keys()].filter(k => groups[k].count), name = k => shorten(groups[k].name, 40);
  // What belongs to no module is no part of a ramp.
  const apart = ramped ? present.filter(k => groups[k].apart) : [], shown = present.filter(k => !apart.includes(k));
  const each = ramped ? Math.ceil(shown.length / MOST_SWATCHES) : 1;
  const end = text => make("li", text, { className: "end" });
  let only = "";
  list.replaceChildren();
  list.classList.toggle("ramp", ramped);
  if (ramped) list.append(end(name(shown[0])));
  const entry = (part, named) => {
    const pressed = alone !== null && alone.has(part[0]);
    const label = name(part[0]) + (part.length > 1 ? " to " + name(part.at(-1)) : "");
    const count = part.reduce((sum, k) => sum + groups[k].count, 0);
    const row = make("li"), swatch = make("i", undefined, { className: "swatch" });
    const button = make("button", undefined, { title: label + ": " + counted(count, "storage") });
    if (pressed) only = label;
    swatch.style.background = groups[part[Math.floor(part.length / 2)]].colour;
    button.append(swatch);
    if (named) button.append(label); else button.setAttribute("aria-label", label);
    button.setAttribute("aria-pressed", String(pressed));
    button.addEventListener("click", () => {
      colours.alone = pressed ? null : new Set(part);
      showLegend(app);
      app.redraw();
    });
    row.append(button);
    list.append(row);
  };
  for (let at = 0; at < shown.length; at += each) entry(shown.slice(at, at + each), !ramped);
  if (ramped) list.append(end(only ? "only " + only : name(shown.at(-1))));
  for (const k of apart) entry([k], true);
  document.getElementById("mode").value = colours.mode;
  document.getElementById("depth-field").hidden = colours.mode !== "module" || colours.deepest < 2;
  const depth = document.getElementById("depth");
  if (document.activeElement !== depth) depth.value = colours.depth;
}
