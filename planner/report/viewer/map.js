// One plan's map: rectangles of time × offset, under them the live bytes. A base canvas holds what changes with the
// view, an overlay what changes with the pointer, so that hovering redraws next to nothing.
const FONT = "11px system-ui, sans-serif", MOST_LABELS = 500;

class MapView {
  constructor(app, plan, p, figure) {
    Object.assign(this, { app, plan, p, plot: figure.querySelector(".plot"), selected: -1, hovered: -1 });
    [this.base, this.overlay] = figure.querySelectorAll("canvas");
    figure.querySelector("figcaption").textContent = plan.label;
    // Small ones first: where several share a pixel, the one that takes more of the map shows.
    const weight = Float64Array.from(plan.size, (bytes, i) => bytes * (plan.until[i] - plan.from[i]));
    this.order = Int32Array.from({ length: plan.count }, (_, i) => i).filter(i => plan.size[i] > 0);
    this.order.sort((a, b) => weight[a] - weight[b] || a - b);
    this.stale = true;
  }

  /** Where things lie, in CSS pixels. */
  frame() {
    const width = this.plot.clientWidth, height = this.plot.clientHeight, x0 = width < 420 ? 62 : 74, x1 = width - 10;
    const curve = clamp(height * 0.17, 44, 110), y1 = Math.max(height - curve - 44, 40);
    return { width, height, x0, x1, y0: 6, y1, c0: height - curve - 4, c1: height - 6 };
  }
  toX(f, step) { const v = this.app.view; return f.x0 + (step - v.t0) / (v.t1 - v.t0) * (f.x1 - f.x0); }
  toY(f, offset) { const v = this.app.view; return f.y1 - (offset - v.o0) / (v.o1 - v.o0) * (f.y1 - f.y0); }
  at(event) {
    const box = this.plot.getBoundingClientRect(), f = this.frame(), v = this.app.view;
    const x = event.clientX - box.left, y = event.clientY - box.top, across = x >= f.x0 && x <= f.x1;
    return { x, y, t: v.t0 + (x - f.x0) / (f.x1 - f.x0) * (v.t1 - v.t0),
      o: v.o0 + (f.y1 - y) / (f.y1 - f.y0) * (v.o1 - v.o0),
      inside: across && y >= f.y0 && y <= f.y1, curve: across && y > f.y1 && y <= f.height };
  }
  get matches() { return this.app.matches && this.app.matches[this.p]; }
  find({ t, o, inside }) { return inside ? this.plan.alive.find(Math.floor(2 * t), o) : -1; }

  pen(canvas, f) {
    const ratio = window.devicePixelRatio || 1;
    const width = Math.max(1, Math.round(f.width * ratio)), height = Math.max(1, Math.round(f.height * ratio));
    if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
    const pen = canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, f.width, f.height);
    pen.font = FONT;
    return pen;
  }

  draw() {
    const began = performance.now(), f = this.frame();
    if (this.stale) {
      this.stale = false;
      this.drawBase(f);
      this.base.dataset.frameMs = (performance.now() - began).toFixed(2);
    }
    this.drawOverlay(f);
    this.overlay.dataset.frameMs = (performance.now() - began).toFixed(2);
  }

  drawBase(f) {
    const pen = this.pen(this.base, f), theme = this.app.theme, { t0, t1, o0, o1 } = this.app.view;
    const ratio = window.devicePixelRatio || 1, left = Math.round(f.x0 * ratio), top = Math.round(f.y0 * ratio);
    const wide = Math.max(1, Math.round((f.x1 - f.x0) * ratio)), high = Math.max(1, Math.round((f.y1 - f.y0) * ratio));
    const image = pen.createImageData(wide, high);
    const labels = this.rasterise(image, ratio);
    pen.putImageData(image, left, top);
    this.drawLabels(pen, f, labels);
    pen.fillStyle = theme.quiet;
    pen.textAlign = "right";
    for (const [offset, label] of tickLabels(ticks(o0, o1, clamp((f.y1 - f.y0) / 44, 2, 9), true))) {
      const y = this.toY(f, offset);
      pen.fillText(label, f.x0 - 7, clamp(y + 4, 10, f.y1 + 3));
      pen.fillRect(f.x0 - 4, Math.round(y) - 0.5, 4, 1);
    }
    pen.fillText("step", f.x0 - 7, f.y1 + 16);
    pen.textAlign = "center";
    const few = (f.x1 - f.x0) / (t1 - t0) > 16;
    for (const step of ticks(Math.max(t0, 0), t1, clamp((f.x1 - f.x0) / 70, 2, 14), false))
      if (step < this.plan.steps) {
        const x = this.toX(f, step + (few ? 0.5 : 0)), half = pen.measureText(number(step)).width / 2;
        if (x <= f.x1) pen.fillText(number(step), Math.min(x, f.width - half - 1), f.y1 + 16);
      }
    this.drawCurve(pen, f);
    Object.assign(this.plot.dataset, { t0, t1, o0, o1, left: f.x0, right: f.x1, top: f.y0, bottom: f.y1 });
  }

  /** Fill the image's pixels, each with the storage that lies there; returns the rectangles with room for a name. */
  rasterise(image, ratio) {
    const { width, height } = image, pixels = new Uint32Array(image.data.buffer);
    const { plan, matches, app: { colours, theme, view: { t0, t1, o0, o1 } } } = this, group = colours.groupOf[this.p];
    const { full, shade, faint } = colours.pixels(theme.field), all = colours.alone === null && !matches;
    const byTime = width / (t1 - t0) / 2, byOffset = height / (o1 - o0);
    const labels = [], wide = 34 * ratio, high = 12 * ratio;
    let count = 0;
    this.fillGround(pixels, width, height, byTime, byOffset);
    for (const i of this.order) {
      let x = (plan.from[i] - 2 * t0) * byTime, x1 = (plan.until[i] - 2 * t0) * byTime;
      let y1 = height - (plan.offset[i] - o0) * byOffset, y = y1 - plan.size[i] * byOffset;
      if (x1 <= 0 || x >= width || y1 <= 0 || y >= height) continue;
      count++;
      if (x1 - x > wide && y1 - y > high) labels.push(i);
      let a = Math.round(x), b = Math.round(x1), c = Math.round(y), d = Math.round(y1);
      if (b <= a) { a = Math.floor(x); b = a + 1; }
      if (d <= c) { c = Math.floor(y); d = c + 1; }
      // A seam between neighbours, where there is room for one.
      const seam = b - a > 3 && d - c > 3;
      if (seam) { b--; c++; }
      a = Math.max(a, 0); b = Math.min(b, width); c = Math.max(c, 0); d = Math.min(d, height);
      const shown = all || colours.stands(this.p, i, matches);
      const colour = (!shown ? faint : seam || i & 1 ? full : shade)[group[i]];
      for (let row = c * width; row < d * width; row += width) {
        if (b - a < 8) for (let k = row + a; k < row + b; k++) pixels[k] = colour;
        else pixels.fill(colour, row + a, row + b);
      }
    }
    this.plot.dataset.rectangles = count;
    return labels;
  }

  /** The arena while the plan runs, apart from what lies beyond it where another plan is larger or longer. */
  fillGround(pixels, width, height, byTime, byOffset) {
    const { t0, o0 } = this.app.view, { theme } = this.app, field = packed(channels(theme.field));
    const end = clamp(Math.round((2 * this.plan.steps - 2 * t0) * byTime), 0, width);
    const top = clamp(Math.round(height - (this.plan.arena - o0) * byOffset), 0, height);
    pixels.fill(packed(channels(theme.ground)));
    for (let row = top; row < height; row++) pixels.fill(field, row * width, row * width + end);
  }

  drawLabels(pen, f, labels) {
    const { plan, matches, app: { colours } } = this;
    pen.save(); pen.beginPath(); pen.rect(f.x0, f.y0, f.x1 - f.x0, f.y1 - f.y0); pen.clip();
    let drawn = 0;
    // The largest come last in drawing order and first here.
    for (let at = labels.length - 1; at >= 0 && drawn < MOST_LABELS; at--) {
      const i = labels[at];
      if (!colours.stands(this.p, i, matches)) continue;
      const x = Math.max(this.toX(f, plan.from[i] / 2), f.x0), x1 = Math.min(this.toX(f, plan.until[i] / 2), f.x1);
      const y = Math.max(this.toY(f, plan.offset[i] + plan.size[i]), f.y0);
      const y1 = Math.min(this.toY(f, plan.offset[i]), f.y1);
      const room = Math.floor((x1 - x - 8) / 5.8);
      if (y1 - y < 12 || room < (plan.names[i].length > room ? 8 : 2)) continue;
      pen.fillStyle = colours.groups[colours.groupOf[this.p][i]].ink;
      pen.fillText(shorten(plan.names[i], room), x + 4, y + Math.min((y1 - y) / 2 + 4, 15), x1 - x - 7);
      drawn++;
    }
    pen.restore();
    this.plot.dataset.labels = drawn;
  }

  drawCurve(pen, f) {
    const { plan, app: { theme, view } } = this, top = Math.max(this.app.limits.arena, 1);
    const y = n => f.c1 - n / top * (f.c1 - f.c0);
    pen.fillStyle = theme.field;
    pen.fillRect(f.x0, f.c0 - 1, clamp(this.toX(f, plan.steps), f.x0, f.x1) - f.x0, f.c1 - f.c0 + 1);
    pen.save(); pen.beginPath(); pen.rect(f.x0, f.c0 - 3, f.x1 - f.x0, f.c1 - f.c0 + 6); pen.clip();
    // A column for each pixel at most, as high as the largest of its steps.
    const first = Math.max(0, Math.floor(view.t0)), end = Math.min(plan.steps, Math.ceil(view.t1));
    const columns = Math.min(end - first, Math.ceil(f.x1 - f.x0));
    const edge = column => first + Math.floor(column * (end - first) / columns);
    pen.fillStyle = theme.live;
    pen.beginPath();
    for (let column = 0; column < columns; column++) {
      const low = edge(column), high = edge(column + 1);
      let most = 0;
      for (let k = low; k < high; k++) if (plan.live[k] > most) most = plan.live[k];
      pen.rect(this.toX(f, low), y(most), this.toX(f, high) - this.toX(f, low) + 0.3, f.c1 - y(most));
    }
    pen.fill();
    const line = (n, colour, dashes) => {
      const at = Math.round(y(n)) + 0.5;
      pen.strokeStyle = colour; pen.lineWidth = 1; pen.setLineDash(dashes);
      pen.beginPath(); pen.moveTo(f.x0, at); pen.lineTo(f.x1, at); pen.stroke(); pen.setLineDash([]);
    };
    if (plan.arena !== plan.summary.lower_bound_bytes) line(plan.arena, theme.text, []);
    line(plan.summary.lower_bound_bytes, theme.bound, [5, 4]);
    pen.fillStyle = theme.bound;
    pen.beginPath(); pen.arc(this.toX(f, plan.peak + 0.5), y(plan.live[plan.peak]), 4, 0, 7); pen.fill();
    pen.restore();
    pen.fillStyle = theme.quiet;
    pen.textAlign = "right"; pen.fillText("live", f.x0 - 7, f.c1); pen.textAlign = "left";
    this.drawCaption(pen, f);
  }

  /** What the lines of the curve are; parts that do not fit are left out. */
  drawCaption(pen, f) {
    const { plan, app: { theme } } = this, bound = size(plan.summary.lower_bound_bytes);
    const peak = "peak " + size(plan.live[plan.peak]) + " at step " + number(plan.peak);
    const parts = [["●", theme.bound, peak], ["╌", theme.bound, "lower bound " + bound]];
    if (plan.arena !== plan.summary.lower_bound_bytes) parts.push(["—", theme.text, "arena " + size(plan.arena)]);
    else parts[1][2] += " = arena";
    let x = f.x0;
    for (const [mark, colour, text] of parts) {
      const width = pen.measureText(text).width + 30;
      if (x + width - 16 > f.x1) break;
      pen.fillStyle = colour; pen.fillText(mark, x, f.c0 - 6);
      pen.fillStyle = theme.quiet; pen.fillText(text, x + 13, f.c0 - 6);
      x += width;
    }
  }

  drawOverlay(f) {
    const pen = this.pen(this.overlay, f), { plan, app } = this, { theme } = app;
    pen.save(); pen.beginPath(); pen.rect(f.x0, 0, f.x1 - f.x0, f.height); pen.clip();
    const mark = (step, colour, dashes) => {
      if (step < 0 || step >= plan.steps) return;
      const x = this.toX(f, step), width = this.toX(f, step + 1) - x;
      pen.globalAlpha = 0.08; pen.fillStyle = colour;
      if (width > 3) { pen.fillRect(x, f.y0, width, f.y1 - f.y0); pen.fillRect(x, f.c0, width, f.c1 - f.c0); }
      pen.globalAlpha = 1; pen.strokeStyle = colour; pen.lineWidth = 1; pen.setLineDash(dashes);
      pen.beginPath();
      for (const at of width > 3 ? [x, x + width] : [x + width / 2])
        for (const [from, to] of [[f.y0, f.y1], [f.c0, f.c1]]) { pen.moveTo(at, from); pen.lineTo(at, to); }
      pen.stroke(); pen.setLineDash([]);
    };
    mark(plan.peak, theme.bound, [2, 3]);
    mark(app.step, theme.text, []);
    pen.beginPath(); pen.rect(f.x0, f.y0 - 1, f.x1 - f.x0, f.y1 - f.y0 + 2); pen.clip();
    const outline = (i, width, faint) => {
      const x = this.toX(f, plan.from[i] / 2), y = this.toY(f, plan.offset[i] + plan.size[i]);
      const w = Math.max(this.toX(f, plan.until[i] / 2) - x, 2), h = Math.max(this.toY(f, plan.offset[i]) - y, 2);
      pen.lineJoin = "round";
      for (const [colour, thick] of [[theme.ground, width + 2], [faint ? theme.quiet : theme.text, width]]) {
        pen.strokeStyle = colour; pen.lineWidth = thick; pen.strokeRect(x, y, w, h);
      }
    };
    if (this.selected >= 0) {
      for (const i of plan.chain(this.selected)) if (i !== this.selected) outline(i, 1, true);
      outline(this.selected, 2.5, false);
    }
    if (this.hovered >= 0 && this.hovered !== this.selected) outline(this.hovered, 1.5, false);
    if (app.box && app.box.view === this) {
      const { x, y, x2, y2 } = app.box;
      pen.fillStyle = theme.accent; pen.globalAlpha = 0.2; pen.fillRect(x, y, x2 - x, y2 - y); pen.globalAlpha = 1;
      pen.strokeStyle = theme.accent; pen.lineWidth = 1; pen.strokeRect(x, y, x2 - x, y2 - y);
    }
    pen.restore();
  }
}
