for (const head of document.querySelectorAll("table.sortable thead th")) {
  const button = document.createElement("button");
  button.type = "button";
  button.append(...head.childNodes);
  head.append(button);
  button.addEventListener("click", () => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = row => row.cells[head.cellIndex].dataset.key ?? row.cells[head.cellIndex].textContent.trim();
    const body = head.closest("table").tBodies[0];
    const order = (a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const d = isNaN(x) || isNaN(y) ? x.localeCompare(y, undefined, { numeric: true }) : x - y;
      return up ? d : -d;
    };
    body.append(...[...body.rows].sort(order));
  });
}
