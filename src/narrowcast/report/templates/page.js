(() => {
  "use strict";
  const root = document.documentElement;
  const data = document.getElementById("plots");
  const plots = data ? JSON.parse(data.textContent) : [];
  const scales = new Map();
  const PAPER_PX = 680;

  const variable = (name) => getComputedStyle(root).getPropertyValue(name).trim();

  // A colour such as "--fp32" is a variable of the style; every other text stays as it is.
  const coloured = (value, key) => {
    if (Array.isArray(value)) return value;
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, coloured(inner, name)]));
    }
    const isColour = typeof value === "string" && /color$/.test(key) && value.startsWith("--");
    return isColour ? variable(value) : value;
  };

  const layoutOf = (plot, narrow, paper) => {
    const axis = {gridcolor: variable("--grid"), linecolor: variable("--line"), zerolinecolor: variable("--grid"),
      automargin: true, tickfont: {size: narrow ? 10 : 12}};
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: {family: variable("--sans"), color: variable("--ink"), size: narrow ? 11 : 13},
      margin: {l: narrow ? 42 : 60, r: narrow ? 8 : 16, t: 8, b: 44},
      legend: {orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: {size: narrow ? 11 : 13}},
      hoverlabel: {bgcolor: variable("--card"), bordercolor: variable("--line"), font: {color: variable("--ink")}, align: "left"},
      hovermode: "closest",
      dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
      ...coloured(plot.layout, ""),
    };
    if (paper) layout.width = PAPER_PX;
    for (const name of ["xaxis", "yaxis", "yaxis2"]) {
      if (layout[name]) layout[name] = {...axis, ...layout[name]};
    }
    if (scales.has(plot.name)) layout.yaxis.type = scales.get(plot.name);
    return layout;
  };

  const draw = (paper = false) => {
    const narrow = !paper && innerWidth < 640;
    const config = {displaylogo: false, responsive: !paper, scrollZoom: false, showTips: false,
      displayModeBar: narrow || paper ? false : "hover",
      modeBarButtonsToRemove: ["lasso2d", "select2d", "autoScale2d"]};
    for (const plot of plots) {
      Plotly.react(plot.name, coloured(plot.traces.map((trace) => coloured(trace, "")), ""), layoutOf(plot, narrow, paper), config);
    }
  };

  for (const button of document.querySelectorAll("button.log")) {
    button.addEventListener("click", () => {
      const log = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(log));
      scales.set(button.dataset.plot, log ? "log" : "linear");
      draw();
    });
  }

  const search = document.getElementById("search");
  if (search) {
    const lines = [...document.querySelectorAll(".dots li")];
    search.addEventListener("input", () => {
      const wanted = search.value.toLowerCase();
      let found = 0;
      for (const line of lines) {
        line.hidden = !line.querySelector(".name").textContent.toLowerCase().includes(wanted);
        found += !line.hidden;
      }
      document.getElementById("searched").textContent = wanted ? `${found} of ${lines.length}` : "";
    });
  }

  for (const find of document.querySelectorAll(".find-rows")) {
    const groups = [...document.getElementById(find.getAttribute("aria-controls")).querySelectorAll("tbody")];
    find.addEventListener("input", () => {
      const wanted = find.value.toLowerCase();
      for (const group of groups) {
        const [head, ...rows] = group.rows;
        const all = head.textContent.toLowerCase().includes(wanted);
        for (const row of rows) row.hidden = !all && !row.textContent.toLowerCase().includes(wanted);
        group.hidden = rows.every((row) => row.hidden);
      }
    });
  }

  if (plots.length) {
    draw();
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw());
    matchMedia("(max-width: 639px)").addEventListener("change", () => draw());
    addEventListener("beforeprint", () => { root.dataset.theme = "light"; draw(true); });
    addEventListener("afterprint", () => { delete root.dataset.theme; draw(); });
  }
})();
