// The page: plans, the view they share, and what the controls do to it.
class App {
  constructor(header, plans) {
    this.header = header;
    const most = of => Math.max(1, ...plans.map(of));
    this.limits = { steps: most(plan => plan.steps), arena: most(plan => plan.arena) };
    this.view = { t0: 0, t1: this.limits.steps, o0: 0, o1: this.limits.arena };
    this.colours = new Colours(plans, header);
    this.matches = this.box = null;
    this.readTheme();
    this.maps = plans.map((plan, p) => {
      const figure = document.getElementById("map-template").content.cloneNode(true).firstElementChild;
      document.getElementById("maps").append(figure);
      const map = new MapView(this, plan, p, figure);
      map.plot.dataset.storages = plan.count;
      pointerControls(this, map);
      return map;
    });
    this.active = this.maps[0];
    this.step = plans[0].peak;
    this.panel = new Panel(this);
    this.search = new Search(this);
    keyControls(this);
    this.chrome();
    this.open(header.open);
    new ResizeObserver(() => this.redraw()).observe(document.getElementById("maps"));
    this.redraw();
  }

  /** Where the page opens: the step and the tensor of the command line, else the peak. */
  open({ step, storage }) {
    if (step !== null) this.step = step;
    if (storage !== null) {
      const { plan } = this.maps[0];
      if (step === null) this.step = clamp(plan.peak, plan.birth[storage], plan.death[storage] - 1);
      this.select(this.maps[0], storage, true);
    }
    if (step !== null || storage !== null) this.showStep();
    this.describe();
  }

  // What is shown

  redraw(stale = true) {
    if (stale) for (const map of this.maps) map.stale = true;
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => { this.asked = false; for (const map of this.maps) map.draw(); });
  }
  look(t0, t1, o0, o1) {
    const { steps, arena } = this.limits;
    const fit = (low, high, limit, least) => {
      const span = clamp(high - low, Math.min(least, limit), limit);
      const start = clamp((low + high - span) / 2, 0, limit - span);
      return [start, start + span];
    };
    [this.view.t0, this.view.t1] = fit(t0, t1, steps, 1);
    [this.view.o0, this.view.o1] = fit(o0, o1, arena, 16);
    hideTip();
    this.redraw();
  }
  whole() { this.look(0, this.limits.steps, 0, this.limits.arena); }
  zoom(t, o, byTime, byOffset) {
    const { t0, t1, o0, o1 } = this.view;
    this.look(t - (t - t0) * byTime, t + (t1 - t) * byTime, o - (o - o0) * byOffset, o + (o1 - o) * byOffset);
  }
  zoomMiddle(byTime, byOffset) {
    const { t0, t1, o0, o1 } = this.view, i = this.active.selected, { plan } = this.active;
    let t = this.step + 0.5, o = i >= 0 ? plan.offset[i] + plan.size[i] / 2 : (o0 + o1) / 2;
    if (t < t0 || t > t1) t = (t0 + t1) / 2;
    if (o < o0 || o > o1) o = (o0 + o1) / 2;
    this.zoom(t, o, byTime, byOffset);
  }
  move(dt, dO) {
    const v = this.view, t = clamp(dt, -v.t0, this.limits.steps - v.t1), o = clamp(dO, -v.o0, this.limits.arena - v.o1);
    this.look(v.t0 + t, v.t1 + t, v.o0 + o, v.o1 + o);
  }
  moveBy(shareT, shareO) { this.move(shareT * (this.view.t1 - this.view.t0), shareO * (this.view.o1 - this.view.o0)); }
  fit(map, i) {
    if (i < 0) return;
    const { plan } = map, wide = (plan.until[i] - plan.from[i]) / 2, from = plan.from[i] / 2;
    const aroundT = Math.max(wide * 0.3, 2), aroundO = Math.max(plan.size[i] * 0.6, 64);
    this.look(from - aroundT, from + wide + aroundT, plan.offset[i] - aroundO, plan.offset[i] + plan.size[i] + aroundO);
  }
  showStep() {
    const { t0, t1, o0, o1 } = this.view, span = t1 - t0;
    if (this.step + 1 > t1 || this.step < t0) this.look(this.step + 0.5 - span / 2, this.step + 0.5 + span / 2, o0, o1);
  }
  /** Bring a storage into view where it is outside. */
  showStorage(map, i) {
    const { plan } = map, v = this.view, from = plan.from[i] / 2, until = plan.until[i] / 2;
    const low = plan.offset[i], high = low + plan.size[i];
    const f = map.frame(), wide = (until - from) / (v.t1 - v.t0) * (f.x1 - f.x0);
    const tall = plan.size[i] / (v.o1 - v.o0) * (f.y1 - f.y0);
    if (plan.size[i] > 0 && (wide < 3 || tall < 3)) this.fit(map, i);
    else if (until <= v.t0 || from >= v.t1 || high <= v.o0 || low >= v.o1) {
      const t = (from + until) / 2, o = (low + high) / 2, dt = (v.t1 - v.t0) / 2, dO = (v.o1 - v.o0) / 2;
      this.look(t - dt, t + dt, o - dO, o + dO);
    }
  }

  // Step and selection

  goTo(step) {
    if (!Number.isFinite(step)) return;
    this.step = clamp(Math.round(step), 0, this.active.plan.steps - 1);
    this.showStep();
    this.describe();
    this.redraw(false);
    const { plan } = this.active, operation = plan.operation(this.step);
    const name = operation ? ", " + operation.name.slice(0, 200) : "";
    this.say("step " + number(this.step) + name + ", " + size(plan.live[this.step]) + " alive");
  }
  activate(map) {
    if (map === this.active) return;
    this.active = map;
    this.describe();
  }
  otherPlan() {
    if (this.maps.length < 2) return;
    this.maps[(this.maps.indexOf(this.active) + 1) % this.maps.length].plot.focus();
  }
  /** Select a storage (in the other plan the one of its name); `jump` moves step and view to it. */
  select(map, i, jump = false) {
    this.active = map;
    map.selected = i;
    for (const other of this.maps) if (other !== map) {
      other.selected = i < 0 ? -1 : other.plan.indexOf.get(map.plan.names[i]) ?? -1;
    }
    if (i >= 0 && jump) {
      this.step = clamp(this.step, map.plan.birth[i], map.plan.death[i] - 1);
      this.showStorage(map, i);
    }
    this.describe();
    this.redraw(false);
    const { plan } = map;
    if (i >= 0) this.say(plan.names[i].slice(0, 200) + ", " + size(plan.size[i]) + ", " + lifetime(plan, i));
  }
  selectBeside(above) {
    const map = this.active, { plan, selected: i } = map;
    const half = i >= 0 ? halfAt(plan, i, this.step) : 2 * this.step + 1;
    let found;
    if (i >= 0) { const near = neighbours(plan, i, half); found = above ? near.above : near.below; }
    else found = above ? plan.alive.above(half, 0) : plan.alive.below(half, plan.arena + 1);
    if (found >= 0) this.select(map, found, true);
  }
  selectLargest() {
    const { plan } = this.active, alive = plan.alive.during(this.step);
    alive.sort((a, b) => plan.size[b] - plan.size[a] || a - b);
    if (alive.length) this.select(this.active, alive[0], true);
  }
  selectChain(by) {
    const { plan, selected: i } = this.active, other = i < 0 ? -1 : by < 0 ? plan.inPlaceOf[i] : plan.next[i];
    if (other >= 0) this.select(this.active, other, true);
  }
  letGo() {
    this.select(this.active, -1);
    this.colours.alone = null;
    this.search.clear();
    showLegend(this);
  }
  click(map, p) {
    if (!p.inside && !p.curve) return;
    this.step = clamp(Math.floor(p.t), 0, map.plan.steps - 1);
    if (p.inside) this.select(map, map.find(p)); else this.goTo(this.step);
  }
  hover(map, p, event) {
    const before = map.hovered;
    map.hovered = map.find(p);
    const step = Math.floor(p.t);
    if (map.hovered >= 0) showTip(hoverText(this, map.plan, map.hovered), event);
    else if (p.curve && step >= 0 && step < map.plan.steps) {
      const operation = map.plan.operation(step);
      const call = operation ? ": " + shorten(operation.name, 100) + " = " + shorten(operation.operator, 100) : "";
      showTip("step " + number(step) + call + "\n" + size(map.plan.live[step]) + " alive", event);
    } else hideTip();
    if (before !== map.hovered) this.redraw(false);
  }
  describe() { this.panel.show(); }
  say(text) { document.getElementById("said").textContent = text; }

  // Around the maps

  chrome() {
    const element = id => document.getElementById(id);
    const on = (id, does, kind = "click") => element(id).addEventListener(kind, does);
    on("whole", () => this.whole());
    on("theme", () => this.toggleTheme());
    on("keys", () => element("help").showModal());
    on("earlier", () => this.goTo(this.step - 1));
    on("later", () => this.goTo(this.step + 1));
    on("to-peak", () => this.goTo(this.active.plan.peak));
    on("step", event => { if (event.target.value !== "") this.goTo(Number(event.target.value)); }, "input");
    on("step", event => { event.target.value = Math.min(this.step, this.active.plan.steps - 1); }, "blur");
    on("mode", event => this.setMode(event.target.value), "change");
    on("depth", event => {
      this.colours.depth = clamp(Math.round(Number(event.target.value)) || 1, 1, this.colours.deepest);
      this.setMode("module");
    }, "input");
    const deep = this.maps.some(({ plan }) => plan.modules.some(path => path !== ""));
    element("mode").querySelector("[value=module]").disabled = !deep;
    element("depth").max = this.colours.deepest;
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.themed());
    for (const map of this.maps) {
      const { plan } = map, kind = plan.summary.mode + " plan, " + plan.summary.strategy;
      const counts = counted(plan.count, "storage") + " over " + counted(plan.steps, "step");
      map.plot.setAttribute("aria-label", "Offset map of " + shorten(plan.label || "a " + kind, 100) + ": " + counts);
    }
    if (this.maps.length === 1) showFigures(this.maps[0].plan); else showDifference(this);
    showLegend(this);
  }
  setMode(mode) {
    this.colours.mode = mode;
    this.colours.alone = null;
    this.colours.regroup(this.dark);
    showLegend(this);
    this.describe();
    this.redraw();
  }
  nextMode() {
    const options = [...document.getElementById("mode").options];
    const modes = options.filter(option => !option.disabled).map(option => option.value);
    this.setMode(modes[(modes.indexOf(this.colours.mode) + 1) % modes.length]);
    this.say("coloured by " + this.colours.mode);
  }
  toggleTheme() {
    document.documentElement.dataset.theme = this.dark ? "light" : "dark";
    this.themed();
  }
  themed() {
    this.readTheme();
    this.setMode(this.colours.mode);
  }
  readTheme() {
    const style = getComputedStyle(document.documentElement), of = name => style.getPropertyValue("--" + name).trim();
    const names = ["ground", "field", "text", "quiet", "accent", "live", "bound"];
    this.theme = Object.fromEntries(names.map(name => [name, hexLong(of(name))]));
    this.dark = luminance(this.theme.ground) < 0.2;
  }
}

const hexLong = hex => hex.length === 4 ? "#" + [...hex.slice(1)].map(digit => digit + digit).join("") : hex;

async function start() {
  const began = performance.now(), root = document.documentElement;
  const { header, column } = await unpack(document.getElementById("plan").textContent);
  new App(header, header.plans.map(record => new PlanData(record, column)));
  requestAnimationFrame(() => {
    root.dataset.loadMs = (performance.now() - began).toFixed(1);
    root.dataset.ready = "yes";
  });
}
start().catch(error => {
  const needs = "It needs a browser of 2023 or later.";
  document.getElementById("maps").dataset.failed = "yes";
  document.getElementById("maps").textContent = "The map cannot be shown: " + error.message + ". " + needs;
  throw error;
});
