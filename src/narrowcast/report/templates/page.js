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
})();
