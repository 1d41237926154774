// Numbers and names as people read them; elements with text, never with markup.
const number = n => n.toLocaleString("en-US");

const counted = (n, thing) => number(n) + " " + thing + (n === 1 ? "" : "s");

function size(n) {
  for (const [unit, name] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]])
    if (Math.abs(n) >= unit) return (n / unit).toFixed(2) + " " + name;
  return n + " B";
}

/** A short label for an axis: no more digits than its tick needs. */
function tickSize(n) { return size(n).replace(/\.00 /, " ").replace(/(\.\d)0 /, "$1 "); }

/** A label for each offset; where they are too close for two digits, how far each is above the first. */
function tickLabels(offsets) {
  const labels = offsets.map(tickSize), same = labels.some((label, k) => k && label === labels[k - 1]);
  return offsets.map((offset, k) => [offset, same && k ? "+" + tickSize(offset - offsets[0]) : labels[k]]);
}

function make(tag, text, properties) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  return Object.assign(made, properties);
}

/** At most `most` characters: the middle of a long name is left out, its end tells more than its beginning. */
function shorten(text, most) {
  if (text.length <= most) return text;
  const letters = Array.from(text);
  if (letters.length <= most) return text;
  const head = Math.max(1, Math.floor((most - 1) * 0.4));
  return letters.slice(0, head).join("") + "…" + letters.slice(letters.length - (most - 1 - head)).join("");
}

/** Round values between `low` and `high`, at most `most`: powers of two for bytes, 1, 2, 5 times ten for steps. */
function ticks(low, high, most, binary) {
  const bases = binary ? [1, 2, 4, 8] : [1, 2, 5], power = binary ? 16 : 10;
  for (let unit = 1; unit < 1e18; unit *= power) for (const base of bases) if ((high - low) / (unit * base) <= most) {
    const found = [];
    for (let at = Math.ceil(low / (unit * base)) * unit * base; at <= high; at += unit * base) found.push(at);
    return found;
  }
  return [];
}

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
