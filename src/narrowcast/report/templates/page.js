(() => {
  "use strict";
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
})();
