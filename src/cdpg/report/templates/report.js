(function () {
  "use strict";
  var root = document.documentElement;
  var each = function (selector, act) { Array.prototype.forEach.call(document.querySelectorAll(selector), act); };
  each(".tool", function (button) { button.hidden = false; });

  /* Theme: the system's until the reader chooses. */
  var theme = document.getElementById("theme");
  var system = window.matchMedia("(prefers-color-scheme: dark)");
  var isDark = function () {
    var chosen = root.getAttribute("data-theme");
    return chosen ? chosen === "dark" : system.matches;
  };
  var show = function () {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", "Switch to the " + (isDark() ? "light" : "dark") + " page");
  };
  try {
    var kept = window.localStorage.getItem("cdpg-theme");
    if (kept === "dark" || kept === "light") { root.setAttribute("data-theme", kept); }
  } catch (error) { /* storage is closed to this page: the choice lasts as long as the page */ }
  theme.addEventListener("click", function () {
    var next = isDark() ? "light" : "dark";
    root.setAttribute("data-theme", next);
    try { window.localStorage.setItem("cdpg-theme", next); } catch (error) { /* as above */ }
    show();
  });
  if (system.addEventListener) { system.addEventListener("change", show); }
  show();

  /* Paper shows what is folded away. */
  window.addEventListener("beforeprint", function () {
    each(".samples details", function (details) { details.open = true; });
  });

  /* Sorting: numbers first, then rows without one, in the order they had. */
  var keyOf = function (row, place) {
    var value = row.children[place].getAttribute("data-sort");
    return value === null || value === "" ? null : Number(value);
  };
  each("table", function (table) {
    var body = table.tBodies[0];
    Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, place) {
      var button = document.createElement("button");
      button.type = "button";
      while (head.firstChild) { button.appendChild(head.firstChild); }
      head.appendChild(button);
      button.addEventListener("click", function () {
        var up = head.getAttribute("aria-sort") === "descending" || (place === 0 && !head.hasAttribute("aria-sort"));
        Array.prototype.forEach.call(table.tHead.rows[0].cells, function (other) { other.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        var rows = Array.prototype.slice.call(body.rows);
        rows.sort(function (first, second) {
          var a = keyOf(first, place), b = keyOf(second, place);
          if (a === null || b === null) { return (a === null) - (b === null); }
          return up ? a - b : b - a;
        });
        rows.forEach(function (row) { body.appendChild(row); });
      });
    });
  });

  /* Files. */
  var save = function (name, type, content) {
    var address = URL.createObjectURL(new Blob([content], { type: type }));
    var link = document.createElement("a");
    link.href = address;
    link.download = name;
    document.body.appendChild(link);
    link.click();
    link.remove();
    window.setTimeout(function () { URL.revokeObjectURL(address); }, 10000);
  };
  var tables = JSON.parse(document.getElementById("csv-data").textContent);
  each("[data-csv]", function (button) {
    button.addEventListener("click", function () {
      var name = button.getAttribute("data-csv");
      save(name + ".csv", "text/csv", "\ufeff" + tables[name]);
    });
  });
  each("[data-svg]", function (button) {
    button.addEventListener("click", function () {
      var name = button.getAttribute("data-svg");
      var drawing = document.getElementById("f-" + name).querySelector("svg").cloneNode(true);
      var box = drawing.viewBox.baseVal;
      drawing.setAttribute("width", box.width + "pt");
      drawing.setAttribute("height", box.height + "pt");
      var header = '<?xml version="1.0" encoding="utf-8"?>\n';
      save(name + ".svg", "image/svg+xml", header + new XMLSerializer().serializeToString(drawing));
    });
  });
})();
