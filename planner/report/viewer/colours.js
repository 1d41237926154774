// Colours by role, module or dtype. The palette and the ramp stay apart for colour-blind readers, on light and dark.

/** Cividis (Nuñez, Anderton, Renslow 2018), for ordered groups: the layers of a deep model. */
const RAMP = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55",
  "#fee838"];
const NEUTRAL = "#848b94";
const channels = hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16));
const hexOf = parts => "#" + parts.map(part => Math.round(part).toString(16).padStart(2, "0")).join("");
const packed = ([r, g, b]) => (0xff000000 | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r)) >>> 0;
const blend = (one, two, share) => one.map((part, k) => part * share + two[k] * (1 - share));

function luminance(hex) {
  const linear = part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
  const [r, g, b] = channels(hex).map(part => linear(part / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
const inkOn = hex => luminance(hex) > 0.19 ? "#14161a" : "#ffffff";

function ramp(share) {
  const at = share * (RAMP.length - 1), low = Math.min(Math.floor(at), RAMP.length - 2);
  return hexOf(blend(channels(RAMP[low + 1]), channels(RAMP[low]), at - low));
}

class Colours {
  constructor(plans, header) {
    this.plans = plans;
    this.header = header;
    this.mode = "role";
    this.alone = null;
    this.deepest = 1;
    for (const { modules } of plans)
      for (const path of modules) this.deepest = Math.max(this.deepest, path.split(".").length);
    this.depth = 1;
    while (this.depth < this.deepest && this.#largestModule() > 0.4) this.depth++;
    this.regroup(false);
  }

  /** The share of the storages with a module that the largest group at the present depth has. */
  #largestModule() {
    const counts = new Map();
    let all = 0;
    for (const plan of this.plans) {
      const sizes = new Float64Array(plan.modules.length);
      for (const k of plan.module) sizes[k]++;
      plan.modules.forEach((path, k) => {
        if (!path) return;
        const group = this.#path(path);
        counts.set(group, (counts.get(group) || 0) + sizes[k]);
        all += sizes[k];
      });
    }
    let most = 0;
    for (const count of counts.values()) most = Math.max(most, count);
    return all ? most / all : 0;
  }
  #path(path) { return path.split(".").slice(0, this.depth).join("."); }

  /** What the present mode tells storages apart by: a column of each plan, and a name for each of its values. */
  #kinds(plan) {
    if (this.mode === "role") return { column: plan.role, name: k => this.header.roles[k].name };
    if (this.mode === "dtype") return { column: plan.dtype, name: k => plan.dtypes[k] };
    return { column: plan.module, name: k => this.#path(plan.modules[k]) };
  }

  /** Groups of the present mode, in order of the roles or of first appearance, and the group of each storage. */
  regroup(dark) {
    const index = new Map(), roles = this.mode === "role" ? this.header.roles : [];
    this.groups = roles.map(({ name, colour }, k) => { index.set(name, k); return { name, colour, count: 0 }; });
    this.groupOf = this.plans.map(plan => {
      const { column, name } = this.#kinds(plan), present = new Set(column), groupOf = new Map();
      for (const k of [...present].sort((a, b) => a - b)) {
        const key = name(k);
        if (!index.has(key)) {
          index.set(key, this.groups.length);
          this.groups.push({ name: key, colour: "", count: 0 });
        }
        groupOf.set(k, index.get(key));
      }
      const found = column.map(k => groupOf.get(k));
      for (const group of found) this.groups[group].count++;
      return found;
    });
    this.ramped = false;
    if (this.mode !== "role") this.#colour(dark);
    for (const group of this.groups) { group.ink = inkOn(group.colour); group.rgb = channels(group.colour); }
  }

  #colour(dark) {
    const named = this.groups.filter(group => group.name !== ""), { palette } = this.header;
    this.ramped = named.length > palette.length;
    const [low, high] = dark ? [0.28, 1] : [0.14, 0.88];
    named.forEach((group, k) => {
      group.colour = !this.ramped ? palette[k] : ramp(low + (high - low) * k / (named.length - 1));
    });
    for (const group of this.groups) if (group.name === "") {
      Object.assign(group, { colour: NEUTRAL, name: "(no module)", apart: true });
    }
  }

  /** A packed pixel for each group: full, a shade darker (neighbours too close for a seam differ by it), and faint. */
  pixels(field) {
    const ground = channels(field);
    return {
      full: Uint32Array.from(this.groups, ({ rgb }) => packed(rgb)),
      shade: Uint32Array.from(this.groups, ({ rgb }) => packed(blend(rgb, [0, 0, 0], 0.92))),
      faint: Uint32Array.from(this.groups, ({ rgb }) => packed(blend(rgb, ground, 0.16))),
    };
  }
  stands(p, i, matches) {
    return (this.alone === null || this.alone.has(this.groupOf[p][i])) && (!matches || matches.has(i));
  }
}
