// What is said about a storage or a step.

/** The half step at which a storage is looked at: the chosen step, or the nearest of its lifetime. */
function halfAt(plan, i, step) { return clamp(2 * step, plan.from[i], plan.until[i] - 1); }

function lifetime(plan, i) {
  const span = "steps [" + number(plan.birth[i]) + ", " + number(plan.death[i]) + "), ";
  return span + counted(plan.death[i] - plan.birth[i], "step");
}

function writerText(plan, i) {
  const k = plan.writer[i], operation = plan.operation(k);
  if (!operation) return "the caller, before the first step";
  return "step " + number(k) + ": " + operation.name + " = " + operation.operator;
}

function sourceText(plan, i) {
  const operation = plan.operation(plan.writer[i]);
  return operation ? operation.source : "";
}

function hoverText(app, plan, i) {
  const lines = [shorten(plan.names[i], 160)], tensors = plan.tensors(i), bytes = plan.size[i];
  const exact = bytes < 1024 ? "" : " (" + number(bytes) + " bytes)";
  lines.push(app.header.roles[plan.role[i]].name + ", " + size(bytes) + exact);
  if (tensors.length) lines.push(plan.kind(tensors[0]));
  lines.push(writerText(plan, i));
  const source = sourceText(plan, i), module = plan.modules[plan.module[i]];
  if (source || module) lines.push(shorten([source, module].filter(Boolean).join(", in "), 160));
  lines.push(lifetime(plan, i), "offset " + number(plan.offset[i]));
  if (plan.inPlaceOf[i] >= 0) lines.push("in place of " + shorten(plan.names[plan.inPlaceOf[i]], 160));
  return lines.join("\n");
}

/** What lies directly below and above at a half step: a storage or -1, and the bytes free between. */
function neighbours(plan, i, half) {
  const low = plan.offset[i], high = low + plan.size[i];
  const below = plan.alive.below(half, low), above = plan.alive.above(half, high);
  return { below, belowGap: below < 0 ? low : low - plan.offset[below] - plan.size[below],
    above, aboveGap: above < 0 ? plan.arena - high : plan.offset[above] - high };
}

function stepsText(steps) {
  if (!steps.length) return "";
  const rest = steps.length > 8 ? " and " + number(steps.length - 8) + " more" : "";
  return (steps.length === 1 ? "step " : "steps ") + steps.slice(0, 8).map(number).join(", ") + rest;
}
