// Search by name: what matches stays bright on the map, a list names the first, n and N jump between hits.
const MOST_FOUND = 40;

class Search {
  constructor(app) {
    this.app = app;
    this.field = document.getElementById("search");
    this.list = document.getElementById("found");
    this.hits = [];
    this.at = -1;
    // One lower-case text for each storage: its own name and those of its views.
    this.texts = app.maps.map(({ plan }) => Array.from({ length: plan.count }, (_, i) => {
      const views = Array.from(plan.tensors(i), k => plan.tensorNames[k]).filter(name => name !== null);
      return [plan.names[i], ...views].join("\n").toLowerCase();
    }));
    this.field.addEventListener("input", () => this.run());
    this.field.addEventListener("focus", () => { if (this.hits.length) this.fill(); });
    this.field.addEventListener("keydown", event => this.key(event));
    this.list.addEventListener("keydown", event => this.key(event));
    document.getElementById("find").addEventListener("submit", event => event.preventDefault());
    document.getElementById("find").addEventListener("focusout", event => {
      if (!document.getElementById("find").contains(event.relatedTarget)) this.list.replaceChildren();
    });
    document.getElementById("next").addEventListener("click", () => this.jump(1));
    document.getElementById("previous").addEventListener("click", () => this.jump(-1));
  }

  run() {
    const words = this.field.value.trim().toLowerCase();
    this.hits = [];
    this.at = -1;
    this.app.matches = null;
    if (words) {
      this.app.matches = this.app.maps.map(() => new Set());
      this.texts.forEach((texts, p) => texts.forEach((text, i) => {
        if (text.includes(words)) { this.hits.push([p, i]); this.app.matches[p].add(i); }
      }));
      // An exact name first, then in order of birth.
      const plans = this.app.maps.map(map => map.plan), birth = ([p, i]) => plans[p].birth[i];
      const exact = ([p, i]) => plans[p].names[i].toLowerCase() === words ? 0 : 1;
      // Found in order of plan and storage, which a sort keeps where the rest is equal.
      this.hits.sort((one, two) => exact(one) - exact(two) || birth(one) - birth(two));
    }
    this.fill();
    this.status();
    this.app.redraw();
  }

  fill() {
    this.list.replaceChildren();
    if (this.field.value.trim() && !this.hits.length) this.list.append(make("li", "no match"));
    this.hits.slice(0, MOST_FOUND).forEach(([p, i], at) => {
      const map = this.app.maps[p], { plan } = map, row = make("li"), title = shorten(plan.names[i], 400);
      const button = make("button", undefined, { type: "button", title });
      const where = this.app.maps.length > 1 ? " · " + shorten(plan.label, 20) : "";
      button.append(make("span", shorten(plan.names[i], 90)), make("span", size(plan.size[i]) + where));
      button.addEventListener("click", () => { this.at = at - 1; this.jump(1); map.plot.focus(); });
      row.append(button);
      this.list.append(row);
    });
    const rest = this.hits.length - MOST_FOUND;
    if (rest > 0) this.list.append(make("li", "and " + number(rest) + " more; n and N jump between all"));
  }

  status() {
    const all = this.hits.length;
    let said = "";
    if (this.at >= 0) said = number(this.at + 1) + " of " + number(all);
    else if (this.field.value.trim()) said = all ? counted(all, "hit") : "no match";
    document.getElementById("next").disabled = document.getElementById("previous").disabled = !all;
    document.getElementById("hits").textContent = said;
  }

  jump(by) {
    if (!this.hits.length) return;
    this.at = (Math.max(this.at, by > 0 ? -1 : 0) + by + this.hits.length) % this.hits.length;
    const [p, i] = this.hits[this.at];
    this.list.replaceChildren();
    this.app.select(this.app.maps[p], i, true);
    this.status();
  }

  clear() {
    this.field.value = "";
    this.run();
  }

  key(event) {
    const buttons = [...this.list.querySelectorAll("button")], now = buttons.indexOf(document.activeElement);
    if (event.key === "ArrowDown" && buttons.length) buttons[Math.min(now + 1, buttons.length - 1)].focus();
    else if (event.key === "ArrowUp" && now >= 0) (now ? buttons[now - 1] : this.field).focus();
    else if (event.key === "Enter" && event.target === this.field) this.jump(event.shiftKey ? -1 : 1);
    else if (event.key === "Escape") { this.clear(); this.app.active.plot.focus(); }
    else return;
    event.preventDefault();
    event.stopPropagation();
  }
}
