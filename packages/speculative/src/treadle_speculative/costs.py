"""What a decode step takes, by rows and width: measured, and continued where it is not.

The shape is unknown. On a CPU each token adds its share; a GPU takes the first few for nothing and
then jumps. So there is no formula, only points: between two the cost is a straight line, beyond the
last it goes on with the slope of all, and what another number of rows has shown stands in for what
was never measured.
"""

from collections import deque
from statistics import median_low

NEWEST = 9
FEW = 2
BRIEFLY = 32
LONGEST = 1_024


class Cell:
    """What one shape took: the median of its newest measurements.

    The first run of a shape compiles and allocates, and now and then the machine is busy elsewhere;
    a mean would take long to forget that, the more so where drafting hinges on it.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.step = 0
        self.num = 0
        self._newest: deque[float] = deque(maxlen=NEWEST)

    def add(self, seconds: float, step: int) -> None:
        """Take a measurement in."""
        self._newest.append(seconds)
        self.seconds = median_low(self._newest)
        self.num += 1
        self.step = step

    def holds(self, step: int) -> bool:
        """Whether it still says something: what was seen once, perhaps by accident, not for long."""
        return step - self.step <= min(LONGEST, BRIEFLY << min(self.num, 10))


class StepCosts:
    """Costs of decode steps. Width 0 is a plain step with look-ahead, 1 is one without."""

    def __init__(self) -> None:
        self._cells: dict[int, dict[int, Cell]] = {}
        self._drafting: dict[int, Cell] = {}
        self._steps: dict[int, int] = {}

    def add(self, rows: int, width: int, seconds: float) -> None:
        """A step was measured."""
        here = bucket(rows)
        self._steps[here] = self._steps.get(here, 0) + 1
        cells = self._cells.setdefault(here, {})
        cells.setdefault(width, Cell()).add(seconds, self._steps[here])

    def add_drafting(self, rows: int, seconds: float) -> None:
        """Drafting one token for each row was measured."""
        self._drafting.setdefault(bucket(rows), Cell()).add(seconds, 0)

    def plain_age(self, rows: int) -> float:
        """Steps of so many rows since a plain one; infinity before there were a few."""
        here = bucket(rows)
        cell = self._cells.get(here, {}).get(0)
        return self._steps[here] - cell.step if cell and cell.num >= FEW else float("inf")

    def deepest(self, rows: int) -> int:
        """The longest draft whose cost is known, or known for some other number of rows."""
        return self._points(self._nearest(rows))[-1][0] - 1 if self._cells else 0

    def of(self, rows: int, width: int) -> float:
        """Seconds that a step is expected to take; 0 before anything was measured."""
        if not self._cells:
            return 0.0
        here, near = bucket(rows), self._nearest(rows)
        base = self._base(here, width)
        if width <= 1:
            return base
        points = self._points(near)
        # Every token beyond the first is one more for each of the rows.
        extra = _interpolate(points, width) - points[0][1]
        return base + extra * here / near

    def drafting(self, rows: int) -> float:
        """Seconds that drafting one token for each row is expected to take."""
        if not self._drafting:
            return 0.0
        near = min(self._drafting, key=lambda known: abs(known - bucket(rows)))
        return self._drafting[near].seconds

    def _nearest(self, rows: int) -> int:
        """The number of rows that tells most about the cost of widths, nearest to this one."""
        here = bucket(rows)
        telling = [known for known in self._cells if len(self._points(known)) > 1]
        return min(telling or self._cells, key=lambda known: (abs(known - here), known))

    def _base(self, here: int, width: int) -> float:
        """What a width of one takes, from this number of rows if it was ever measured."""
        cells = self._cells.get(here)
        if cells is None:
            near = min(self._cells, key=lambda known: (abs(known - here), known))
            cells = self._cells[near]
        plain, waited = cells.get(0), cells.get(1)
        if plain is None or waited is None:
            chosen = plain or waited or min(cells.values(), key=lambda cell: cell.seconds)
            return chosen.seconds
        # Giving up look-ahead never makes a step shorter.
        return plain.seconds if width == 0 else max(plain.seconds, waited.seconds)

    def _points(self, here: int) -> list[tuple[int, float]]:
        """Known widths of a number of rows and their costs, which never fall."""
        points = [(1, self._base(here, 1))]
        for width, cell in sorted(self._cells[here].items()):
            if width > 1 and cell.holds(self._steps[here]):
                points.append((width, max(cell.seconds, points[-1][1])))
        return points


def bucket(rows: int) -> int:
    """Numbers of rows that count as one: each up to eight, then about an eighth apart."""
    shift = max(0, rows.bit_length() - 4)
    return rows >> shift << shift


def _interpolate(points: list[tuple[int, float]], width: int) -> float:
    before = points[0]
    for point in points:
        if point[0] >= width:
            return _between(before, point, width)
        before = point
    return _between(points[0], before, width)


def _between(one: tuple[int, float], other: tuple[int, float], width: int) -> float:
    if one[0] == other[0]:
        return one[1]
    slope = (other[1] - one[1]) / (other[0] - one[0])
    return one[1] + slope * (width - one[0])
