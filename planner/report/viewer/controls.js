// Pointer, wheel and keys on a map.
function pointerControls(app, map) {
  const { plot } = map, touches = new Map();
  let drag = null, pinch = null;

  plot.addEventListener("wheel", event => {
    event.preventDefault();
    const p = map.at(event), turn = clamp(event.deltaY, -200, 200) / 400;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) && !event.shiftKey) {
      app.move(event.deltaX / plot.clientWidth * (app.view.t1 - app.view.t0), 0);
      return;
    }
    if (event.ctrlKey || event.metaKey) app.zoom(p.t, p.o, Math.exp(turn * 4), Math.exp(turn * 4));
    else if (event.shiftKey) app.zoom(p.t, p.o, 1, Math.exp((turn || clamp(event.deltaX, -200, 200) / 400) * 1.5));
    else app.zoom(p.t, p.o, Math.exp(turn * 1.5), 1);
  }, { passive: false });

  plot.addEventListener("pointerdown", event => {
    if (event.button) return;
    app.activate(map);
    plot.setPointerCapture(event.pointerId);
    touches.set(event.pointerId, event);
    if (touches.size === 2) {
      pinch = spread([...touches.values()]);
      drag = null;
      return;
    }
    drag = { x: event.clientX, y: event.clientY, from: map.at(event), moved: false, box: event.shiftKey };
  });

  plot.addEventListener("pointermove", event => {
    if (touches.has(event.pointerId)) touches.set(event.pointerId, event);
    if (pinch && touches.size === 2) {
      const now = spread([...touches.values()]), p = map.at({ clientX: now.x, clientY: now.y });
      const by = (before, after) => before > 30 ? before / Math.max(after, 10) : 1;
      app.zoom(p.t, p.o, by(pinch.wide, now.wide), by(pinch.high, now.high));
      pinch = now;
      return;
    }
    if (drag && (drag.moved || Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 4)) {
      drag.moved = true;
      hideTip();
      if (drag.box) {
        plot.classList.add("boxing");
        const p = map.at(event);
        app.box = { view: map, x: drag.from.x, y: drag.from.y, x2: p.x, y2: p.y };
        map.draw();
        return;
      }
      plot.classList.add("moving");
      const f = map.frame(), { t0, t1, o0, o1 } = app.view, right = drag.x - event.clientX, up = event.clientY - drag.y;
      app.move(right / (f.x1 - f.x0) * (t1 - t0), up / (f.y1 - f.y0) * (o1 - o0));
      drag.x = event.clientX;
      drag.y = event.clientY;
      return;
    }
    app.hover(map, map.at(event), event);
  });

  const end = event => {
    touches.delete(event.pointerId);
    plot.classList.remove("boxing", "moving");
    if (touches.size < 2) pinch = null;
    if (!drag) return;
    const done = drag, p = map.at(event);
    drag = app.box = null;
    if (event.type === "pointercancel") return;
    if (done.moved && done.box) {
      if (Math.abs(p.x - done.from.x) > 5 && Math.abs(p.y - done.from.y) > 5)
        app.look(...[p.t, done.from.t].sort((a, b) => a - b), ...[p.o, done.from.o].sort((a, b) => a - b));
      else map.draw();
    } else if (!done.moved) app.click(map, p);
  };
  plot.addEventListener("pointerup", end);
  plot.addEventListener("pointercancel", end);
  plot.addEventListener("pointerleave", () => { map.hovered = -1; hideTip(); map.draw(); });
  plot.addEventListener("dblclick", event => {
    const i = map.find(map.at(event));
    if (i >= 0) app.fit(map, i); else app.whole();
  });
  plot.addEventListener("focus", () => app.activate(map));
}

/** Middle and extent of two touches. */
function spread([one, two]) {
  return { x: (one.clientX + two.clientX) / 2, y: (one.clientY + two.clientY) / 2,
    wide: Math.abs(one.clientX - two.clientX), high: Math.abs(one.clientY - two.clientY) };
}

function showTip(text, event) {
  const tip = document.getElementById("tip");
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const beside = (at, extent, room) => Math.max(4, at + 14 + extent > room - 6 ? at - extent - 12 : at + 14);
  const x = beside(event.clientX, box.width, innerWidth), y = beside(event.clientY, box.height, innerHeight);
  tip.style.transform = "translate(" + x + "px, " + y + "px)";
}
function hideTip() { document.getElementById("tip").hidden = true; }

/** Keys that work anywhere but in a field, and keys of the map. */
function keyControls(app) {
  const nearer = 0.75, farther = 1 / nearer, far = event => event.shiftKey ? 10 : 1;
  const anywhere = {
    "/": () => app.search.field.focus(), "?": () => document.getElementById("help").showModal(), "0": () => app.whole(),
    n: () => app.search.jump(1), N: () => app.search.jump(-1), p: () => app.goTo(app.active.plan.peak),
    c: () => app.nextMode(), t: () => app.toggleTheme(), 
    f: () => app.fit(app.active, app.active.selected), o: () => app.otherPlan(),
    "[": () => app.selectChain(-1), "]": () => app.selectChain(1),
    Escape: () => app.letGo(), "+": () => app.zoomMiddle(nearer, nearer), "=": () => app.zoomMiddle(nearer, nearer),
    "-": () => app.zoomMiddle(farther, farther),
    x: () => app.zoomMiddle(nearer, 1), X: () => app.zoomMiddle(farther, 1),
    y: () => app.zoomMiddle(1, nearer), Y: () => app.zoomMiddle(1, farther),
    w: () => app.moveBy(0, 0.15), s: () => app.moveBy(0, -0.15),
    a: () => app.moveBy(-0.15, 0), d: () => app.moveBy(0.15, 0),
  };
  const onMap = {
    ArrowLeft: event => app.goTo(app.step - far(event)), ArrowRight: event => app.goTo(app.step + far(event)),
    Home: () => app.goTo(0), End: () => app.goTo(app.active.plan.steps - 1),
    ArrowUp: () => app.selectBeside(true), ArrowDown: () => app.selectBeside(false), Enter: () => app.selectLargest(),
  };
  document.addEventListener("keydown", event => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
    const { target } = event;
    if (target.matches("input, select") && event.key !== "Escape") return;
    const free = target === document.body && document.body.scrollHeight <= innerHeight;
    const does = (free || target.matches(".plot")) && onMap[event.key] || anywhere[event.key];
    if (!does) return;
    event.preventDefault();
    does(event);
  });
}
