"use strict";
// Draws the charts that `charts.py` describes. Each is drawn when it comes near the window, and again when the reader
// chooses another axis, rank or colour scheme.
(() => {
  const charts = JSON.parse(document.getElementById("data").textContent);
  const AXES = { step: "step", seconds: "training time (s)", bytes: "bytes sent by rank 0" };
  const CYCLE = ["blue", "orange", "green", "purple", "red", "teal", "pink", "yellow"];
  const NAMED = {
    exchange: "blue", gather: "teal", dense_tail: "purple", headers: "yellow", agree: "pink", accumulate: "muted",
    select: "green", pack: "yellow", reduce: "orange", apply: "red",
    data: "yellow", compute: "blue", wait: "red", update: "green",
  };
  const narrow = window.matchMedia("(max-width: 820px)");
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const colorName = (key) => {
    const numbered = /^(?:run|rank)(\d+)$/.exec(key);
    return numbered ? CYCLE[numbered[1] % CYCLE.length] : NAMED[key] || key;
  };
  const unpack = (text) => {
    const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
    return new Float32Array(bytes.buffer);
  };

  class Drawing {
    constructor(figure) {
      this.figure = figure;
      this.plot = figure.querySelector(".plot");
      this.chart = charts[figure.dataset.chart];
      this.axis = this.chart.axes[0];
      this.rank = 0;
      this.near = false;
      this.hidden = new Set(this.chart.groups.flatMap((group) => group.series).filter((series) => series.off).map((series) => series.name));
      this.drawn = false;
      this.turn = Promise.resolve();
      for (const group of this.chart.groups) {
        for (const axis of Object.keys(group.x)) group.x[axis] = unpack(group.x[axis]);
        for (const series of group.series) series.y = unpack(series.y);
      }
      this.makeChips();
      this.listen("axis", (value) => { this.axis = value; });
      this.log = this.chart.log;
      this.listen("scale", (value) => { this.log = value === "log"; });
      this.listen("zoom", (value) => { this.near = value === "near"; });
    }

    get groups() {
      return this.chart.groups.filter((group) => group.rank === null || group.rank === this.rank);
    }

    listen(what, choose) {
      const buttons = this.figure.querySelectorAll(`button[data-${what}]`);
      buttons.forEach((button) => button.addEventListener("click", () => {
        press(buttons, button);
        choose(button.dataset[what]);
        this.draw();
      }));
    }

    makeChips() {
      const chips = this.figure.querySelector(".chips");
      chips.textContent = "";
      for (const series of this.groups.flatMap((group) => group.series)) {
        const chip = document.createElement("button");
        chip.type = "button";
        chip.dataset.series = series.name;
        chip.textContent = series.name;
        chip.style.setProperty("--chip", `var(--${colorName(series.color)})`);
        chip.setAttribute("aria-pressed", String(!this.hidden.has(series.name)));
        chip.addEventListener("click", () => this.toggle(series.name, chip));
        chips.append(chip);
      }
    }

    toggle(name, chip) {
      if (!this.hidden.delete(name)) this.hidden.add(name);
      chip.setAttribute("aria-pressed", String(!this.hidden.has(name)));
      this.draw();
    }

    choose(rank) {
      this.rank = rank;
      this.makeChips();
      if (this.drawn) this.draw();
    }

    traces() {
      const traces = [];
      for (const group of this.groups) {
        for (const series of group.series) traces.push(this.trace(group, series));
      }
      return traces;
    }

    trace(group, series) {
      const color = css(colorName(series.color));
      const shown = {
        name: series.name, x: group.x[this.axis], y: series.y, visible: !this.hidden.has(series.name),
        hovertemplate: `%{y:${this.chart.kind === "number" ? ".4~g" : ".3~s"}}${this.suffix()}`,
      };
      if (series.style === "bar") return { ...shown, type: "bar", marker: { color }, ...this.seat(series) };
      const single = group.x[this.axis].length < 2;
      shown.type = "scatter";
      shown.mode = series.style === "dots" || single ? "lines+markers" : "lines";
      if (series.style === "area") {
        return { ...shown, stackgroup: "one", line: { width: 0.5, color }, fillcolor: color };
      }
      const width = series.style === "faint" ? 1.2 : 2;
      const line = { color, width, dash: series.style === "dash" ? "dash" : "solid" };
      return { ...shown, line, marker: { color, size: 6 }, opacity: series.style === "faint" ? 0.75 : 1, connectgaps: series.style === "dots" };
    }

    seat(series) {
      // Bars of one place share it; those that are not there take no room.
      const bars = this.groups.flatMap((group) => group.series).filter((each) => !this.hidden.has(each.name));
      const width = [], offset = [];
      for (let i = 0; i < series.y.length; i += 1) {
        const there = bars.filter((each) => each.y[i] > 0);
        width.push(0.8 / Math.max(there.length, 1));
        offset.push(-0.4 + width[i] * Math.max(there.indexOf(series), 0));
      }
      return { width, offset };
    }

    suffix() {
      return { bytes: "B", seconds: "s" }[this.chart.kind] || "";
    }

    layout() {
      const ink = css("ink"), soft = css("soft"), grid = css("grid");
      const common = { gridcolor: grid, linecolor: grid, zeroline: false, tickangle: 0, tickfont: { color: soft, size: 11 } };
      const title = (text) => ({ text, font: { color: soft, size: 12 }, standoff: 6 });
      const xaxis = { ...common, title: title(AXES[this.axis]) };
      if (this.axis === "bytes") Object.assign(xaxis, { tickformat: "~s", ticksuffix: "B" });
      if (this.chart.labels.length) {
        const places = this.chart.groups[0].x[this.axis];
        const every = Math.ceil(places.length / (narrow.matches ? 7 : 14));
        const kept = Array.from(places.keys()).filter((i) => i % every === 0);
        Object.assign(xaxis, { title: title(this.chart.x_title), tickvals: kept.map((i) => places[i]), ticktext: kept.map((i) => this.chart.labels[i]) });
      }
      const yaxis = { ...common, title: title(this.chart.y_title), type: this.log ? "log" : "linear" };
      if (this.chart.kind !== "number") Object.assign(yaxis, { tickformat: "~s", ticksuffix: this.suffix() });
      if (this.log) Object.assign(yaxis, this.logAxis());
      else if (this.chart.from_zero) yaxis.rangemode = "tozero";
      if (this.near) yaxis.range = [0, this.chart.zoom];
      return {
        xaxis, yaxis, ...this.marks(soft), showlegend: false, barmode: "overlay",
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 12 },
        margin: { l: 66, r: 18, t: 22, b: 48 }, hovermode: "x unified",
        hoverlabel: { bgcolor: css("card"), bordercolor: css("line"), font: { color: ink } },
        modebar: { bgcolor: "rgba(0,0,0,0)", color: soft, activecolor: css("accent") },
        dragmode: narrow.matches ? false : "zoom",
      };
    }

    tick(value) {
      if (this.chart.kind === "number") return value >= 1e4 ? value.toLocaleString("en") : String(value);
      const [size, unit] = [[1e9, "G"], [1e6, "M"], [1e3, "k"], [1, ""], [1e-3, "m"]].find(([least]) => value >= least) || [1e-6, "\u00b5"];
      return `${Number((value / size).toPrecision(3))}${unit}${this.suffix()}`;
    }

    logAxis() {
      const shown = this.groups.flatMap((group) => group.series.map((series) => series.y)).flatMap((y) => Array.from(y).filter((value) => value > 0));
      const low = this.chart.labels.length ? 1 : Math.min(...shown), high = Math.max(...shown);
      const digits = high / low < 3 ? [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9] : high / low < 20 ? [1, 2, 3, 5] : high / low < 1000 ? [1, 3] : [1];
      const tickvals = [];
      for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1) {
        tickvals.push(...digits.map((digit) => Number(`${digit}e${power}`)));
      }
      const axis = { tickvals, ticktext: tickvals.map((value) => this.tick(value)) };
      if (this.chart.labels.length) axis.range = [-0.3, Math.log10(high) + 0.15];
      return axis;
    }

    marks(color) {
      const last = Math.max(...this.groups.map((group) => group.x[this.axis].at(-1) || 0));
      const shapes = [], annotations = [];
      for (const [at, name] of this.chart.marks) {
        const x = at[this.axis];
        shapes.push({ type: "line", x0: x, x1: x, y0: 0, y1: 1, yref: "paper", line: { color, width: 1, dash: "dot" } });
        annotations.push({ x, y: 1, yref: "paper", yanchor: "bottom", xanchor: x > last / 2 ? "right" : "left", text: name, showarrow: false, font: { color, size: 11 } });
      }
      return { shapes, annotations };
    }

    draw() {
      this.drawn = true;
      const bar = narrow.matches ? false : "hover";
      const config = { responsive: true, displaylogo: false, displayModeBar: bar, modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };
      this.turn = this.turn.then(() => Plotly.react(this.plot, this.traces(), this.layout(), config));  // one at a time
    }
  }

  const press = (buttons, pressed) => buttons.forEach((button) => button.setAttribute("aria-pressed", String(button === pressed)));
  const drawings = new Map(Array.from(document.querySelectorAll("figure.chart"), (figure) => [figure, new Drawing(figure)]));
  const redraw = () => drawings.forEach((drawing) => drawing.drawn && drawing.draw());
  const drawAll = () => drawings.forEach((drawing) => drawing.drawn || drawing.figure.closest("[hidden]") || drawing.draw());

  const observer = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((each) => each.isIntersecting)) {
      observer.unobserve(entry.target);
      const drawing = drawings.get(entry.target);
      if (!drawing.drawn) drawing.draw();
    }
  }, { rootMargin: "300px" });
  drawings.forEach((_, figure) => observer.observe(figure));

  document.querySelectorAll(".ranks").forEach((choice) => {
    const buttons = choice.querySelectorAll("button");
    buttons.forEach((button) => button.addEventListener("click", () => {
      press(buttons, button);
      choice.closest("article").querySelectorAll("figure.chart").forEach((figure) => drawings.get(figure).choose(Number(button.dataset.rank)));
    }));
  });
  const runButtons = document.querySelectorAll("nav.runs button");
  runButtons.forEach((button) => button.addEventListener("click", () => {
    press(runButtons, button);
    document.querySelectorAll("article.run").forEach((article) => { article.hidden = article.dataset.run !== button.dataset.run; });
  }));
  document.querySelectorAll("a.definition").forEach((link) => link.addEventListener("click", () => { document.getElementById("definitions").open = true; }));
  dark.addEventListener("change", redraw);
  narrow.addEventListener("change", redraw);
  const toPaper = (paper) => {  // paper is light, and plots have the colours of when they were drawn
    document.documentElement.classList.toggle("paper", paper);
    if (dark.matches) redraw();
  };
  window.addEventListener("beforeprint", () => { toPaper(true); drawAll(); });
  window.addEventListener("afterprint", () => toPaper(false));
})();
