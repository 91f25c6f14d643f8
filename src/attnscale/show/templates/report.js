"use strict";
// Draw the map of heads from the numbers in the page, in the page's own colours.
const data = JSON.parse(document.getElementById("figure").textContent);
const map = document.getElementById("map");
const metric = document.getElementById("metric");

function draw() {
  const chosen = data.metrics[metric.value];
  const ink = getComputedStyle(document.body).color;
  const trace = {
    type: "heatmap", z: chosen.values, y: data.rows, text: data.hover, xgap: 1, ygap: 1,
    zmin: chosen.from, zmax: chosen.to, colorscale: chosen.colours,
    hovertemplate: "%{text}<br>head %{x}<br>" + metric.value + " %{z:.3g}<extra></extra>",
    colorbar: { thickness: 12, outlinewidth: 0, tickfont: { color: ink } },
  };
  const layout = {
    width: map.clientWidth, height: Math.max(180, 90 + 22 * data.rows.length), margin: { l: 8, r: 8, t: 8, b: 40 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: ink, family: "system-ui, sans-serif" },
    xaxis: { title: { text: "head" }, dtick: chosen.values[0].length > 16 ? 4 : 1, zeroline: false, showgrid: false, fixedrange: true },
    yaxis: { automargin: true, autorange: "reversed", type: "category", zeroline: false, showgrid: false, fixedrange: true },
  };
  Plotly.react(map, [trace], layout, { displayModeBar: false });
}

metric.addEventListener("change", draw);
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
