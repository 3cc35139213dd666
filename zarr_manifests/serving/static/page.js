// The grid of chunks by keyboard, and the quick look at values: no dependencies, nothing fetched
// but `/slice` of the server that the page came from.
"use strict";

(() => {
  // --- colours --------------------------------------------------------------------------------

  const MOST = 512; // values along each side of a picture, as /slice gives at most
  const SEQUENTIAL = ["440154", "472d7b", "3b528b", "2c728e", "21918c", "28ae80", "5ec962", "addc30", "fde725"];
  const DIVERGING = ["053061", "2166ac", "4393c3", "92c5de", "d1e5f0", "f7f7f7", "fddbc7", "f4a582", "d6604d", "b2182b", "67001f"];
  const IN_ONE_ONLY = [176, 110, 192];

  /** 256 colours, linear between the stops. */
  function table(stops) {
    const rgb = stops.map((hex) => [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16)));
    return Array.from({ length: 256 }, (_, at) => {
      const place = (at / 255) * (rgb.length - 1);
      const low = Math.min(Math.floor(place), rgb.length - 2);
      return rgb[low].map((c, i) => Math.round(c + (rgb[low + 1][i] - c) * (place - low)));
    });
  }
  const TABLES = { sequential: table(SEQUENTIAL), diverging: table(DIVERGING) };

  /** The colours for these arrays of values: least, greatest and which table; null without values. */
  function scaleOf(arrays, around = false) {
    let low = Infinity, high = -Infinity;
    for (const values of arrays)
      for (const value of values)
        if (Number.isFinite(value)) {
          if (value < low) low = value;
          if (value > high) high = value;
        }
    if (low > high) return null;
    const most = Math.max(Math.abs(low), Math.abs(high));
    // Values on both sides of zero: equal colours for equal distances from it.
    const both = low < 0 && high > 0 && Math.min(-low, high) > most / 10;
    if (around || both) return { low: -most, high: most, least: low, greatest: high, table: "diverging" };
    return { low, high, least: low, greatest: high, table: "sequential" };
  }

  function colourOf(value, scale) {
    const part = scale.high > scale.low ? (value - scale.low) / (scale.high - scale.low) : 0.5;
    return TABLES[scale.table][Math.round(Math.min(Math.max(part, 0), 1) * 255)];
  }

  // --- numbers and ticks ----------------------------------------------------------------------

  function text(value) {
    if (Number.isNaN(value)) return "missing";
    if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
    const size = Math.abs(value);
    const told = size !== 0 && (size >= 1e7 || size < 1e-4) ? value.toExponential(3) : String(Number(value.toPrecision(6)));
    return told.replace("-", "−");
  }

  function niceTicks(low, high, wanted, steps = [1, 2, 5, 10]) {
    if (!(high > low)) return [low];
    const raw = (high - low) / wanted;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = steps.length > 4 && high - low > 8
      ? steps.find((each) => each >= raw) || steps[steps.length - 1]
      : power * [1, 2, 5, 10].find((each) => each * power >= raw * 0.999);
    const found = [];
    const start = Math.ceil(low / step - 1e-9);
    for (let at = start; at * step <= high + step * 1e-9 && at < start + 20; at++) found.push(Number((at * step).toPrecision(12)));
    return found;
  }

  const DEGREES = [1, 2, 5, 10, 15, 30, 45, 60, 90];

  function degrees(value, axis) {
    if (axis === "lat") return value === 0 ? "0°" : `${text(Math.abs(value))}°${value > 0 ? "N" : "S"}`;
    const east = value > 180 ? value - 360 : value;
    if (east === 0 || Math.abs(east) === 180) return `${Math.abs(east)}°`;
    return `${text(Math.abs(east))}°${east > 0 ? "E" : "W"}`;
  }

  /** A value of an axis in words. */
  function labelOf(axis, at) {
    if (axis.labels) return axis.labels[at];
    if (axis.values[at] === null) return "none";
    const value = axis.values[at];
    if (axis.kind === "lat" || axis.kind === "lon") return degrees(Number(value.toPrecision(7)), axis.kind);
    return axis.units ? `${text(value)} ${axis.units}` : text(value);
  }

  /** Whether the numbers of an axis only go up (1) or down (-1); 0 if neither. */
  function direction(axis) {
    if (axis.labels || axis.values.length < 2 || axis.values.some((v) => v === null)) return 0;
    const sign = Math.sign(axis.values[1] - axis.values[0]);
    for (let at = 1; at < axis.values.length; at++)
      if (Math.sign(axis.values[at] - axis.values[at - 1]) !== sign) return 0;
    return sign;
  }

  /** Ticks as [place from 0 to 1 along the positions, label]. */
  function ticksOf(axis, wanted) {
    const count = axis.values.length, sign = direction(axis);
    if (sign === 0 || count < 3) {
      const shown = Math.min(count, wanted);
      return Array.from({ length: shown }, (_, i) => {
        const at = shown > 1 ? Math.round((i * (count - 1)) / (shown - 1)) : 0;
        return [(at + 0.5) / count, labelOf(axis, at)];
      });
    }
    const first = Math.min(axis.values[0], axis.values[count - 1]);
    const last = Math.max(axis.values[0], axis.values[count - 1]);
    const map = axis.kind === "lat" || axis.kind === "lon";
    return niceTicks(first, last, wanted, map ? DEGREES : undefined).map((value) => {
      let at = 0;
      while (at < count - 2 && sign * (axis.values[at + 1] - value) < 0) at++;
      const part = (value - axis.values[at]) / (axis.values[at + 1] - axis.values[at]);
      return [(at + part + 0.5) / count, map ? degrees(value, axis.kind) : text(value)];
    });
  }

  /** Whether positions run against the page: up for a vertical axis, right for a horizontal one. */
  function isTurned(axis, vertical) {
    const sign = direction(axis);
    if (!vertical) return sign < 0;
    if (axis.kind === "index") return false; // as a table: the first row on top
    return axis.kind === "down" ? sign < 0 : sign > 0;
  }

  function make(parent, name, className, content) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (content !== undefined) made.textContent = content;
    parent.append(made);
    return made;
  }

  // --- a picture ------------------------------------------------------------------------------

  /** A figure: a canvas with one pixel a value, axes, a bar of colours, and what is under the pointer. */
  class Picture {
    constructor(parent, className = "") {
      this.figure = make(parent, "figure", `plot ${className}`);
      this.caption = make(this.figure, "figcaption");
      this.nameY = make(this.figure, "div", "axis-y-name");
      this.unit = make(this.figure, "div", "bar-name");
      this.axisY = make(this.figure, "div", "axis axis-y");
      this.frame = make(this.figure, "div", "frame");
      this.canvas = make(this.frame, "canvas");
      this.canvas.tabIndex = 0;
      this.canvas.setAttribute("role", "img");
      this.cross = make(this.frame, "div", "cross");
      this.cross.hidden = true;
      this.bar = make(this.figure, "div", "bar");
      this.axisX = make(this.figure, "div", "axis axis-x");
      this.nameX = make(this.figure, "div", "axis-name");
      this.readout = make(this.figure, "p", "readout", "");
      this.readout.setAttribute("role", "status");
      this.canvas.addEventListener("pointermove", (event) => this.pointed(event));
      this.canvas.addEventListener("pointerleave", () => this.shown && this.tell(null));
      this.canvas.addEventListener("keydown", (event) => this.pressed(event));
      this.at = null;
    }

    /** Draw h x w values with their axes; `scale` null where all are missing. */
    show(picture) {
      this.shown = picture;
      this.caption.textContent = picture.title;
      const [h, w] = [picture.y ? picture.y.values.length : 1, picture.x.values.length];
      this.turnedY = picture.y ? isTurned(picture.y, true) : false;
      this.turnedX = isTurned(picture.x, false);
      this.canvas.setAttribute("aria-label", `${picture.title}. Arrow keys read single values.`);
      this.frame.classList.toggle("line", !picture.y);
      this.canvas.classList.toggle("smooth", !picture.y);
      if (picture.y) this.paint(h, w);
      else this.line(w);
      this.frame.style.aspectRatio = String(this.ratio(h, w));
      this.axes();
      this.tell(this.at && this.at[0] < h && this.at[1] < w ? this.at : null);
    }

    paint(h, w) {
      const { values, scale, only } = this.shown;
      this.canvas.width = w;
      this.canvas.height = h;
      const context = this.canvas.getContext("2d");
      const image = context.createImageData(w, h);
      for (let y = 0; y < h; y++)
        for (let x = 0; x < w; x++) {
          const from = y * w + x, value = values[from];
          const lone = only && only[from];
          if ((Number.isNaN(value) || !scale) && !lone) continue; // the hatching shows
          const to = 4 * ((this.turnedY ? h - 1 - y : y) * w + (this.turnedX ? w - 1 - x : x));
          image.data.set(lone ? IN_ONE_ONLY : colourOf(value, scale), to);
          image.data[to + 3] = 255;
        }
      context.putImageData(image, 0, 0);
    }

    line(w) {
      const { values, scale } = this.shown;
      const [width, height] = [1200, 420];
      this.canvas.width = width;
      this.canvas.height = height;
      const context = this.canvas.getContext("2d");
      context.strokeStyle = getComputedStyle(document.documentElement).getPropertyValue("--accent");
      context.fillStyle = context.strokeStyle;
      context.lineWidth = 2.5;
      context.beginPath();
      let open = false;
      for (let at = 0; at < w && scale; at++) {
        const value = values[at];
        if (!Number.isFinite(value)) { open = false; continue; }
        const x = ((this.turnedX ? w - 1 - at : at) + 0.5) / w * width;
        const part = scale.high > scale.low ? (value - scale.low) / (scale.high - scale.low) : 0.5;
        const y = height * (0.96 - 0.92 * part);
        if (open) context.lineTo(x, y);
        else context.moveTo(x, y);
        if (w < 60) context.fillRect(x - 3, y - 3, 6, 6);
        open = true;
      }
      context.stroke();
    }

    /** Width to height: as on a map where both axes have the same units, else what is easy to read. */
    ratio(h, w) {
      const { x, y } = this.shown;
      if (!y) return 1200 / 420;
      let found = w / h;
      const map = x.kind === "lon" && y.kind === "lat";
      if ((map || (x.units && x.units === y.units)) && direction(x) && direction(y)) {
        const span = (axis) => {
          const [a, b] = [axis.values[0], axis.values[axis.values.length - 1]];
          return (Math.abs(b - a) * axis.values.length) / (axis.values.length - 1);
        };
        found = span(x) / span(y);
      } else found = Math.max(found, 1.3);
      return Math.min(Math.max(found, 0.6), 4);
    }

    axes() {
      const { x, y, scale, title, units } = this.shown;
      const put = (parent, ticks, side, turned) => {
        parent.replaceChildren();
        const sizer = side === "top";
        for (const [place, label] of ticks) {
          const tick = make(parent, "span", "", label);
          tick.style[side] = `${100 * (turned ? 1 - place : place)}%`;
          if (sizer) make(parent, "span", "sizer", label); // gives the column its width
        }
      };
      const long = x.labels && x.labels.some((label) => label.length > 7);
      const across = (long ? 5 : 6) - (this.frame.clientWidth < 300 ? 3 : 0);
      put(this.axisX, ticksOf(x, across), "left", this.turnedX);
      this.nameX.textContent = nameOf(x);
      this.nameY.textContent = y ? nameOf(y) : units ? `${title} (${units})` : "";
      this.unit.textContent = y ? units : "";
      this.bar.replaceChildren();
      const levels = scale ? niceTicks(scale.low, scale.high, 5) : [];
      const place = (value) => (scale.high > scale.low ? (scale.high - value) / (scale.high - scale.low) : 0.5);
      if (!y) {
        put(this.axisY, levels.map((value) => [0.04 + 0.92 * place(value), text(value)]), "top", false);
        return;
      }
      put(this.axisY, ticksOf(y, 6), "top", this.turnedY);
      if (!scale) return;
      const bar = make(this.bar, "canvas");
      bar.width = 1;
      bar.height = 256;
      bar.setAttribute("role", "img");
      bar.setAttribute("aria-label", `Colours from ${text(scale.low)} to ${text(scale.high)}${units ? ` ${units}` : ""}`);
      const context = bar.getContext("2d");
      const image = context.createImageData(1, 256);
      TABLES[scale.table].forEach((rgb, at) => image.data.set([...rgb, 255], 4 * (255 - at)));
      context.putImageData(image, 0, 0);
      put(make(this.bar, "div", "axis axis-bar"), levels.map((value) => [place(value), text(value)]), "top", false);
      Object.assign(this.canvas.dataset, { low: scale.low, high: scale.high, colours: scale.table });
    }

    pointed(event) {
      if (!this.shown) return;
      const box = this.canvas.getBoundingClientRect();
      const [h, w] = this.size();
      const along = (part, count, turned) => {
        const at = Math.min(Math.max(Math.floor(part * count), 0), count - 1);
        return turned ? count - 1 - at : at;
      };
      this.tell([
        along((event.clientY - box.top) / box.height, h, this.turnedY),
        along((event.clientX - box.left) / box.width, w, this.turnedX),
      ]);
    }

    pressed(event) {
      if (!this.shown) return;
      const [h, w] = this.size();
      const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      if (event.key === "Escape") this.tell(null);
      else if (event.key in steps) {
        const far = event.shiftKey ? 10 : 1;
        const [down, right] = steps[event.key];
        const [y, x] = this.at || [Math.floor(h / 2), Math.floor(w / 2)];
        const clip = (at, count) => Math.min(Math.max(at, 0), count - 1);
        this.tell([
          clip(y + far * (this.turnedY ? -down : down), h),
          clip(x + far * (this.turnedX ? -right : right), w),
        ]);
      } else return;
      event.preventDefault();
    }

    size() {
      return [this.shown.y ? this.shown.y.values.length : 1, this.shown.x.values.length];
    }

    /** Say what the value at a position is; null says what all of them are. */
    tell(at) {
      this.at = at;
      this.cross.hidden = at === null;
      const { x, y, values, units, scale, summary, only } = this.shown;
      if (at === null) {
        const range = scale ? `${text(scale.least)} to ${text(scale.greatest)}${units ? ` ${units}` : ""}` : "all values are missing";
        this.readout.textContent = summary || range;
        return;
      }
      const [h, w] = this.size();
      const value = values[at[0] * w + at[1]];
      const place = (position, count, turned) => (turned ? count - 1 - position : position) / count;
      const style = this.cross.style;
      style.top = y ? `${100 * place(at[0], h, this.turnedY)}%` : "0";
      style.left = `${100 * place(at[1], w, this.turnedX)}%`;
      style.height = y ? `${100 / h}%` : "100%";
      style.width = `${100 / w}%`;
      const where = [y && `${y.name} ${labelOf(y, at[0])}`, `${x.name} ${labelOf(x, at[1])}`];
      const told = only && only[at[0] * w + at[1]] ? "in one version only" : text(value);
      this.readout.textContent = `${where.filter(Boolean).join(", ").trim()}: ${told}${units && Number.isFinite(value) ? ` ${units}` : ""}`;
    }
  }

  function nameOf(axis) {
    const shown = axis.title || axis.name;
    return axis.units && !["time", "lat", "lon"].includes(axis.kind) ? `${shown} (${axis.units})` : shown;
  }

  // --- what the server gives ------------------------------------------------------------------

  const NORTH = /^degrees?_?n(orth)?$/i, EAST = /^degrees?_?e(ast)?$/i;

  function kindOf(told) {
    const units = told.units || "", name = told.name || "";
    if (NORTH.test(units) || (!units && /^lat(itude)?$/i.test(name))) return "lat";
    if (EAST.test(units) || (!units && /^lon(gitude)?$/i.test(name))) return "lon";
    return told.positive === "down" ? "down" : "";
  }

  /** An axis with `count` positions, as pictures take it, from what the server says of it. */
  function axisOf(told, count) {
    const axis = { name: told.name || `axis ${told.axis}`, title: told.long_name || "", units: told.units || "", labels: null };
    if (!told.values || told.values.length !== count)
      return { ...axis, kind: "index", units: "", values: Array.from({ length: count }, (_, at) => told.start + at * told.step) };
    if (!told.values.some((value) => typeof value === "string")) return { ...axis, kind: kindOf(told), values: told.values };
    const short = told.values.every((value) => value === null || value.endsWith("T00:00:00"));
    const labels = told.values.map((value) => (value === null ? "no time" : short ? value.slice(0, 10) : value.replace("T", " ")));
    return { ...axis, kind: "time", values: told.values, labels };
  }

  /** Values and what they are, at these parts of the array; null where a version ends before. */
  async function sliceOf(version, parts) {
    const texts = parts.map((part, axis) => {
      const size = version.shape[axis];
      if (part.step) return `0:${Math.min(part.stop, size)}:${part.step}`;
      return part.at < size ? String(part.at) : null;
    });
    if (texts.includes(null)) return null;
    const found = await fetch(`${version.slice}?index=${encodeURIComponent(texts.join(","))}`);
    if (!found.ok) throw new Error((await found.text()).slice(0, 300) || `the server answers ${found.status}`);
    const body = await found.arrayBuffer();
    const length = new DataView(body).getUint32(0, true);
    const told = JSON.parse(new TextDecoder().decode(new Uint8Array(body, 4, length)));
    return { told, values: new Float32Array(body, 4 + length) };
  }

  /** The same of several versions, with the same steps: the server may take larger ones. */
  async function slicesOf(versions, parts) {
    for (;;) {
      const found = await Promise.all(versions.map((version) => sliceOf(version, parts)));
      let raised = false;
      for (const each of found.filter(Boolean))
        for (const axis of each.told.axes) {
          const part = parts[axis.axis];
          if (axis.step <= part.step) continue;
          raised = true;
          part.step = axis.step;
          part.count = Math.ceil(part.stop / part.step);
        }
      if (!raised || versions.length === 1) return found;
    }
  }

  /** The values in a frame that the array of this version may not fill; missing beyond its end. */
  function framed(found, parts) {
    const counts = parts.filter((part) => part.step).map((part) => part.count);
    const size = counts.reduce((a, b) => a * b, 1);
    if (found && found.values.length === size) return found.values;
    const whole = new Float32Array(size).fill(NaN);
    if (!found) return whole;
    const own = found.told.axes.map((axis) => axis.count);
    const [width, wide] = [own[own.length - 1] || 1, counts[counts.length - 1] || 1];
    found.values.forEach((value, at) => { whole[Math.floor(at / width) * wide + (at % width)] = value; });
    return whole;
  }

  function transposed(values, h, w) {
    const found = new Float32Array(values.length);
    for (let y = 0; y < h; y++) for (let x = 0; x < w; x++) found[x * h + y] = values[y * w + x];
    return found;
  }

  // --- quick look -----------------------------------------------------------------------------

  class Look {
    constructor(section) {
      this.form = section.querySelector("form");
      this.trouble = section.querySelector(".trouble");
      const told = JSON.parse(section.dataset.look);
      this.shape = told.shape;
      this.versions = told.versions;
      this.name = told.name;
      const parent = section.querySelector(".pictures");
      parent.classList.toggle("three", told.versions.length > 1);
      this.pictures = told.versions.map(() => new Picture(parent));
      if (told.versions.length > 1) this.pictures.push(new Picture(parent, "wide"));
      this.turn = 0;
      this.form.addEventListener("input", (event) => {
        this.kept(event.target);
        this.draw();
      });
      this.form.addEventListener("submit", (event) => event.preventDefault());
      this.draw();
    }

    field(name) {
      return this.form.elements.namedItem(name);
    }

    /** Keep slider and number the same, and the two axes different. */
    kept(changed) {
      if (changed.dataset.twin) this.field(changed.dataset.twin).value = changed.value;
      const [down, across] = [this.field("vertical"), this.field("horizontal")];
      if (down && down.value === across.value) {
        const other = changed === down ? across : down;
        other.value = String(this.shape.findIndex((_, axis) => String(axis) !== changed.value));
      }
    }

    /** Jump to a place given by the first cell of a chunk. */
    jump(cell) {
      cell.forEach((at, axis) => {
        if (at === null) return;
        for (const name of [`at${axis}`, `number${axis}`])
          if (this.field(name)) this.field(name).value = String(at);
      });
      this.draw();
    }

    wanted() {
      const down = this.field("vertical"), across = this.field("horizontal");
      const axes = [down, across].filter(Boolean).map((each) => Number(each.value));
      const parts = this.shape.map((size, axis) => {
        if (!axes.includes(axis)) return { at: Math.min(Math.max(Number(this.field(`at${axis}`).value) || 0, 0), size - 1) };
        const step = Math.max(Math.ceil(size / MOST), 1);
        return { step, stop: size, count: Math.ceil(size / step) };
      });
      return { axes, parts };
    }

    async draw() {
      const turn = ++this.turn;
      const { axes, parts } = this.wanted();
      this.shape.forEach((_, axis) => {
        const row = this.form.querySelector(`[data-axis="${axis}"]`);
        if (row) row.hidden = axes.includes(axis);
      });
      try {
        const found = await slicesOf(this.versions, parts);
        if (turn !== this.turn) return; // the controls have moved on
        this.trouble.hidden = true;
        this.arrange(found, axes, parts);
        this.remember(axes, parts);
      } catch (error) {
        if (turn !== this.turn) return;
        this.trouble.textContent = error.message;
        this.trouble.hidden = false;
      }
    }

    arrange(found, axes, parts) {
      const { told } = found.findLast(Boolean);
      const shown = new Map(told.axes.map((each) => [each.axis, axisOf(each, parts[each.axis].count)]));
      const fixed = told.fixed.map((each) => {
        const axis = axisOf(each, 1);
        const label = labelOf(axis, 0);
        this.form.querySelector(`[data-axis="${each.axis}"] output`).textContent = axis.kind === "index" ? "" : label;
        return `${axis.name} ${label}`;
      });
      const [y, x] = axes.length > 1 ? axes.map((axis) => shown.get(axis)) : [null, shown.get(axes[0]) || ALONE];
      let arrays = found.map((each) => framed(each, parts));
      if (axes.length > 1 && axes[0] > axes[1])
        arrays = arrays.map((values) => transposed(values, parts[axes[1]].count, parts[axes[0]].count));
      const title = [told.long_name || this.name, ...fixed].join(", ");
      const units = told.units && !/ since /.test(told.units) ? told.units : "";
      const scale = scaleOf(arrays);
      arrays.forEach((values, at) => {
        const name = this.versions[at].name;
        this.pictures[at].show({ x, y, units, values, scale, title: name ? `${name}: ${title}` : title });
      });
      if (arrays.length > 1)
        this.pictures[2].show({ x, y, units, ...difference(...arrays), title: `Difference, new minus old: ${title}` });
    }

    /** The address of the page says what is shown, so that it can be sent to others. */
    remember(axes, parts) {
      const query = new URLSearchParams();
      ["vertical", "horizontal"].forEach((name) => this.field(name) && query.set(name, this.field(name).value));
      parts.forEach((part, axis) => part.step || query.set(`at${axis}`, String(part.at)));
      history.replaceState(null, "", `?${query}${location.hash}`);
    }
  }

  const ALONE = { name: "value", values: [0], labels: [""], kind: "index" };

  /** New minus old, which cells only one of them has, and both in words. */
  function difference(old, now) {
    const values = new Float32Array(now.length), only = new Uint8Array(now.length);
    let differ = 0, lone = 0;
    for (let at = 0; at < now.length; at++) {
      const [a, b] = [old[at], now[at]];
      const equal = a === b || (Number.isNaN(a) && Number.isNaN(b));
      values[at] = a === b ? 0 : b - a;
      if (Number.isNaN(a) !== Number.isNaN(b)) { only[at] = 1; lone++; }
      else if (!equal) differ++;
    }
    const scale = scaleOf([values], true);
    const changes = scaleOf([values.filter((value) => value !== 0)]);
    const amount = (count) => count.toLocaleString("en");
    let summary = `${amount(differ)} of ${amount(now.length)} values shown differ`;
    if (changes) summary += `, by ${text(changes.least)} to ${text(changes.greatest)}`;
    if (lone) summary += `; ${amount(lone)} are there in one version only`;
    return { values, only, scale, summary: `${summary}.` };
  }

  // --- grid of chunks -------------------------------------------------------------------------

  /** One cell is in the order of tabs; arrow keys move among all; hovering says the same. */
  function grid(table, look) {
    const cells = Array.from(table.rows, (row) => Array.from(row.cells));
    const told = table.closest(".gridbox").querySelector(".told");
    const idle = told.textContent;
    let current = [0, 0];
    const find = (cell) => {
      const y = cell.parentElement.rowIndex;
      return [y, cells[y].indexOf(cell)];
    };
    const move = (y, x) => {
      cells[current[0]][current[1]].tabIndex = -1;
      current = [Math.min(Math.max(y, 0), cells.length - 1), Math.min(Math.max(x, 0), cells[0].length - 1)];
      const cell = cells[current[0]][current[1]];
      cell.tabIndex = 0;
      cell.focus();
    };
    const use = (cell) => {
      if (!look) return;
      look.jump(JSON.parse(cell.dataset.first));
    };
    const cellOf = (event) => event.target.closest("td");
    for (const name of ["pointerover", "focusin"])
      table.addEventListener(name, (event) => { if (cellOf(event)) told.textContent = cellOf(event).getAttribute("aria-label"); });
    table.addEventListener("pointerleave", () => { told.textContent = idle; });
    table.addEventListener("click", (event) => { if (cellOf(event)) { move(...find(cellOf(event))); use(cellOf(event)); } });
    table.addEventListener("keydown", (event) => {
      const [y, x] = current;
      const far = event.ctrlKey;
      const moves = {
        ArrowUp: [y - 1, x], ArrowDown: [y + 1, x], ArrowLeft: [y, x - 1], ArrowRight: [y, x + 1],
        Home: [far ? 0 : y, 0], End: [far ? Infinity : y, Infinity], PageUp: [y - 10, x], PageDown: [y + 10, x],
      };
      if (event.key in moves) move(...moves[event.key]);
      else if (event.key === "Enter" || event.key === " ") use(cells[y][x]);
      else return;
      event.preventDefault();
    });
  }

  const section = document.querySelector("[data-look]");
  const look = section ? new Look(section) : null;
  document.querySelectorAll("table.chunks").forEach((table) => grid(table, look));
})();
