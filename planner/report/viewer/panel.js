// The panel: the chosen step with its largest tensors, and everything about the selected one.
const MOST_LARGEST = 25;

class Panel {
  constructor(app) {
    this.app = app;
    this.selection = document.getElementById("selection");
    this.facts = document.getElementById("step-facts");
    this.largest = document.getElementById("largest");
    this.most = MOST_LARGEST;
  }

  show() {
    this.#step();
    this.#selected();
  }

  #step() {
    const { app } = this, map = app.active, { plan } = map;
    const step = Math.min(app.step, plan.steps - 1), operation = plan.operation(step);
    const field = document.getElementById("step");
    field.max = plan.steps - 1;
    if (document.activeElement !== field) field.value = step;
    this.facts.replaceChildren();
    if (app.maps.length > 1) this.facts.append(make("div", "in " + shorten(plan.label, 80), { className: "plan" }));
    if (operation) {
      const line = make("div");
      line.append(make("b", operation.name), " = " + operation.operator);
      this.facts.append(line);
      const where = [operation.source, operation.module].filter(Boolean).join(", in ");
      if (where) this.facts.append(make("div", where));
    }
    const free = plan.arena - plan.live[step];
    this.facts.append(make("div", size(plan.live[step]) + " alive, " + size(Math.max(free, 0)) + " free"));
    this.#largest(map, plan, step);
  }

  #largest(map, plan, step) {
    const alive = plan.alive.during(step).sort((a, b) => plan.size[b] - plan.size[a] || a - b);
    const reads = new Set(), writes = new Set();
    if (step < plan.operationNames.length) {
      for (const i of plan.reads(step)) reads.add(i);
      for (const i of plan.writes(step)) writes.add(i);
    }
    this.largest.replaceChildren();
    this.largest.dataset.alive = alive.length;
    const shown = alive.length <= this.most + 5 ? alive.length : this.most;
    for (const i of alive.slice(0, shown)) {
      const row = make("li"), button = make("button", undefined, { title: plan.names[i] });
      const swatch = make("i", undefined, { className: "swatch" });
      swatch.style.background = this.app.colours.groups[this.app.colours.groupOf[map.p][i]].colour;
      const use = [reads.has(i) && "read", writes.has(i) && "written"].filter(Boolean).join(", ");
      button.append(swatch, make("span", shorten(plan.names[i], 60), { className: "name" }),
        make("span", use, { className: "use" }), make("span", size(plan.size[i]), { className: "bytes" }));
      if (i === map.selected) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => this.app.select(map, i));
      row.append(button);
      this.largest.append(row);
    }
    const rest = alive.length - shown;
    if (rest > 0) {
      const text = number(rest) + " more alive; show " + number(Math.min(rest, 200));
      const more = make("button", text, { className: "link" });
      more.addEventListener("click", () => { this.most += 200; this.show(); });
      const row = make("li");
      row.append(more);
      this.largest.append(row);
    } else if (!alive.length) this.largest.append(make("p", "nothing is alive"));
  }

  #link(map, i, text) {
    const name = map.plan.names[i], properties = { className: "link", title: shorten(name, 400) };
    const button = make("button", text === undefined ? shorten(name, 120) : text, properties);
    button.addEventListener("click", () => this.app.select(map, i, true));
    return button;
  }

  #selected() {
    const { app, selection } = this, map = app.active, { plan, selected: i } = map;
    selection.replaceChildren();
    if (i < 0) {
      const hint = "Click a rectangle, or press Enter for the largest at this step. ? lists all keys.";
      selection.append(make("h2", "No tensor selected"), make("p", hint));
      return;
    }
    selection.append(make("h2", shorten(plan.names[i], 400)));
    const list = make("dl"), row = (label, ...parts) => {
      const value = make("dd");
      value.append(...parts);
      value.dataset.fact = label;
      list.append(make("dt", label), value);
    };
    const operation = plan.operation(plan.writer[i]), module = plan.modules[plan.module[i]];
    row("role", app.header.roles[plan.role[i]].name);
    row("bytes", number(plan.size[i]) + (plan.size[i] < 1024 ? "" : " (" + size(plan.size[i]) + ")"));
    row("shape", this.#shapes(plan, i));
    row("written by", writerText(plan, i));
    if (operation && operation.source) row("source", operation.source);
    if (module) row("module", module);
    row("lifetime", lifetime(plan, i));
    row("offset", number(plan.offset[i]) + " to " + number(plan.offset[i] + plan.size[i]));
    const written = plan.uses(i, plan.writeStart, plan.writeList);
    const read = plan.uses(i, plan.readStart, plan.readList);
    if (written.length > 1) row("written at", stepsText(written));
    row("read at", stepsText(read) || "no step");
    row("in place", ...this.#chain(map, i));
    this.#around(map, i, row);
    this.#counterpart(map, i, row);
    selection.append(list);
  }

  #shapes(plan, i) {
    const lines = Array.from(plan.tensors(i).slice(0, 12), k => {
      const name = plan.tensorName(k), shift = plan.tensorOffset[k];
      const other = name === plan.names[i] ? "" : "  " + shorten(name, 80);
      return plan.kind(k) + other + (shift ? "  from byte " + number(shift) : "");
    });
    const rest = plan.tensors(i).length - lines.length;
    return lines.join("\n") + (rest > 0 ? "\nand " + number(rest) + " more views" : "") || "none";
  }

  #chain(map, i) {
    const { plan } = map, chain = plan.chain(i);
    if (chain.length === 1) return ["no"];
    const at = chain.indexOf(i), first = Math.max(0, at - 4), shown = chain.slice(first, at + 5), parts = [];
    if (first > 0) parts.push("… ");
    shown.forEach((k, place) => {
      parts.push(place ? " → " : "", k === i ? make("b", shorten(plan.names[k], 80)) : this.#link(map, k));
    });
    if (first + shown.length < chain.length) parts.push(" → …");
    return parts;
  }

  /** What lies directly above and below at the chosen step (or the nearest step of its lifetime). */
  #around(map, i, row) {
    const { plan } = map, half = halfAt(plan, i, this.app.step), found = neighbours(plan, i, half);
    const when = " (step " + number(Math.floor(half / 2)) + ")";
    for (const [label, other, gap, end] of [["above", found.above, found.aboveGap, "the arena's end"],
      ["below", found.below, found.belowGap, "the arena's start"]]) {
      // Less than the alignment is padding, which nothing could use.
      const free = gap >= plan.summary.alignment ? size(gap) + " free" : "";
      if (other < 0) row(label, (free ? free + ", then " : "") + end + when);
      else row(label, this.#link(map, other), (free ? " after " + free : "") + when);
    }
  }

  #counterpart(map, i, row) {
    for (const other of this.app.maps) if (other !== map) {
      const k = other.plan.indexOf.get(map.plan.names[i]);
      if (k === undefined) {
        row("other plan", "has no storage of this name");
        continue;
      }
      const { plan } = other, place = size(plan.size[k]) + " at offset " + number(plan.offset[k]);
      row("other plan", this.#link(other, k, place), ", " + lifetime(plan, k));
    }
  }
}
