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
      app.zoom(p.t, p.o, pinch.wide > 30 ? pinch.wide / Math.max(now.wide, 10) : 1, pinch.high > 30 ? pinch.high / Math.max(now.high, 10) : 1);
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
      const f = map.frame();
      app.move((drag.x - event.clientX) / (f.x1 - f.x0) * (app.view.t1 - app.view.t0), (event.clientY - drag.y) / (f.y1 - f.y0) * (app.view.o1 - app.view.o0));
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
        app.look(Math.min(p.t, done.from.t), Math.max(p.t, done.from.t), Math.min(p.o, done.from.o), Math.max(p.o, done.from.o));
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
  const x = event.clientX + 14 + box.width > innerWidth - 6 ? event.clientX - box.width - 12 : event.clientX + 14;
  const y = event.clientY + 14 + box.height > innerHeight - 6 ? event.clientY - box.height - 12 : event.clientY + 14;
  tip.style.transform = "translate(" + Math.max(4, x) + "px, " + Math.max(4, y) + "px)";
}
function hideTip() { document.getElementById("tip").hidden = true; }

/** Keys that work anywhere but in a field, and keys of the map. */
function keyControls(app) {
  const anywhere = {
    "/": () => app.search.field.focus(), "?": () => document.getElementById("help").showModal(), "0": () => app.whole(),
    n: () => app.search.jump(1), N: () => app.search.jump(-1), p: () => app.goTo(app.active.plan.peak), c: () => app.nextMode(),
    t: () => app.toggleTheme(), f: () => app.fit(app.active, app.active.selected), o: () => app.otherPlan(),
    "[": () => app.selectChain(-1), "]": () => app.selectChain(1),
    Escape: () => app.letGo(), "+": () => app.zoomMiddle(0.75, 0.75), "=": () => app.zoomMiddle(0.75, 0.75), "-": () => app.zoomMiddle(4 / 3, 4 / 3),
    x: () => app.zoomMiddle(0.75, 1), X: () => app.zoomMiddle(4 / 3, 1), y: () => app.zoomMiddle(1, 0.75), Y: () => app.zoomMiddle(1, 4 / 3),
    w: () => app.moveBy(0, 0.15), s: () => app.moveBy(0, -0.15), a: () => app.moveBy(-0.15, 0), d: () => app.moveBy(0.15, 0),
  };
  const onMap = {
    ArrowLeft: event => app.goTo(app.step - (event.shiftKey ? 10 : 1)), ArrowRight: event => app.goTo(app.step + (event.shiftKey ? 10 : 1)),
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
