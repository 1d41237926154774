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
    const { app } = this, map = app.active, { plan } = map, step = Math.min(app.step, plan.steps - 1), operation = plan.operation(step);
    document.getElementById("step-title").textContent = app.maps.length > 1 ? "Step in " + shorten(plan.label, 16) : "Step";
    const field = document.getElementById("step");
    field.max = plan.steps - 1;
    if (document.activeElement !== field) field.value = step;
    this.facts.replaceChildren();
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
      button.append(swatch, make("span", shorten(plan.names[i], 60), { className: "name" }), make("span", use, { className: "use" }),
        make("span", size(plan.size[i]), { className: "bytes" }));
      if (i === map.selected) button.setAttribute("aria-current", "true");
      button.addEventListener("click", () => this.app.select(map, i));
      row.append(button);
      this.largest.append(row);
    }
    const rest = alive.length - shown;
    if (rest > 0) {
      const more = make("button", number(rest) + " more alive; show " + number(Math.min(rest, 200)), { className: "link" });
      more.addEventListener("click", () => { this.most += 200; this.show(); });
      const row = make("li");
      row.append(more);
      this.largest.append(row);
    } else if (!alive.length) this.largest.append(make("p", "nothing is alive"));
  }

  #link(map, i, text) {
    const button = make("button", text === undefined ? shorten(map.plan.names[i], 120) : text, { className: "link", title: shorten(map.plan.names[i], 400) });
    button.addEventListener("click", () => this.app.select(map, i, true));
    return button;
  }

  #selected() {
    const { app, selection } = this, map = app.active, { plan, selected: i } = map;
    selection.replaceChildren();
    if (i < 0) {
      selection.append(make("h2", "No tensor selected"), make("p", "Click a rectangle, or press Enter for the largest at this step. ? lists all keys."));
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
    const written = plan.uses(i, plan.writeStart, plan.writeList), read = plan.uses(i, plan.readStart, plan.readList);
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
      return plan.kind(k) + (name === plan.names[i] ? "" : "  " + shorten(name, 80)) + (shift ? "  from byte " + number(shift) : "");
    });
    const rest = plan.tensors(i).length - lines.length;
    return lines.join("\n") + (rest > 0 ? "\nand " + number(rest) + " more views" : "") || "none";
  }

  #chain(map, i) {
    const chain = map.plan.chain(i);
    if (chain.length === 1) return ["no"];
    const at = chain.indexOf(i), first = Math.max(0, at - 4), shown = chain.slice(first, at + 5), parts = [];
    if (first > 0) parts.push("… ");
    shown.forEach((k, place) => parts.push(place ? " → " : "", k === i ? make("b", shorten(map.plan.names[k], 80)) : this.#link(map, k)));
    if (first + shown.length < chain.length) parts.push(" → …");
    return parts;
  }

  /** What lies directly above and below at the chosen step (or the nearest step of its lifetime). */
  #around(map, i, row) {
    const { plan } = map, half = halfAt(plan, i, this.app.step), found = neighbours(plan, i, half), step = Math.floor(half / 2);
    for (const [label, other, gap] of [["above", found.above, found.aboveGap], ["below", found.below, found.belowGap]]) {
      const free = gap >= plan.summary.alignment ? size(gap) + " free" : "";
      if (other < 0) row(label, (free ? free + ", then " : "") + "the arena's " + (label === "above" ? "end" : "start") + " (step " + number(step) + ")");
      else row(label, this.#link(map, other), (free ? " after " + free : "") + " (step " + number(step) + ")");
    }
  }

  #counterpart(map, i, row) {
    for (const other of this.app.maps) if (other !== map) {
      const k = other.plan.indexOf.get(map.plan.names[i]);
      if (k === undefined) row("other plan", "has no storage of this name");
      else row("other plan", this.#link(other, k, size(other.plan.size[k]) + " at offset " + number(other.plan.offset[k])), ", " + lifetime(other.plan, k));
    }
  }
}
