"""Pictures of two long dashed contours among short ones, with two dots that lie on one contour or on both.

The procedure is that of the Pathfinder challenge (Linsley et al. 2018; Kim et al. 2020) with the settings that LRA
names for contours of 14 dashes, written anew for many pictures at a time:

1. Two contours start near the middle, `seed_distance` apart, and grow in turn, a dash at a time. The next dash lies on
   a circle around the end of the last; its direction is drawn with probability ∝ cos²(min(continuity |turn|, π/2))
   among the places that keep `margin` pixels from everything older. A pair that cannot grow to the end is given up.
2. `num_distractors` short contours are put where there is room, five tries each.
3. A dot marks the start of one contour, and one the end of the same (label 1) or of the other (label 0).
4. Dashes are drawn at twice the resolution, reduced with a Lanczos filter, laid over each other by their maximum, and
   the picture is stretched to 0 ... 255.

Everything that decides is integer arithmetic on tables, so a seed gives the same bytes on every machine.

Departures from the original: thick dashes are drawn as exact rectangles instead of by an image library; a picture is a
member of a batch, so draws come in another order; the last dash of the first contour keeps distractors away too.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.rng import numpy_generator

# not from tasks.base: a process that only generates starts at once without torch
Array = NDArray[Any]

FINE = 2
"""Resolution at which dashes and dots are drawn."""
FULL = 255
OVERLAP = 459
"""1.8 in units of `FULL`: two masks that sum to more cross."""
OCCUPIED = 76
"""0.3 in units of `FULL`: a mask above it leaves no room for a start."""
TRIES, DISTRACTOR_TRIES = 3, 5
"""Draws for one dash, and attempts for one short contour."""


@dataclass(frozen=True)
class Style:
    """The settings of one size of picture. Contrasts are in common units of one marker's brightness."""

    size: int
    margins: tuple[int, ...]
    """Clearance of dashes in pixels, one of them drawn for every picture."""
    length: int
    thickness: int
    """Of a dash, at the fine resolution."""
    radius: int
    """Of a dot, at the fine resolution."""
    seed_distance: int
    continuity: float
    num_distractors: int
    contrasts: tuple[int, int, int]
    """Of the two long contours, of the short ones, of the dots."""
    contour_length: int = 14
    distractor_length: int = 4
    padding: int = 1

    def reach(self, margin: int) -> int:
        """How far a dash with its clearance goes from its start."""
        return self.length + math.ceil(self.thickness / FINE) + margin


STYLES = {
    32: Style(
        size=32,
        margins=(1,),
        length=2,
        thickness=1,
        radius=3,
        seed_distance=7,
        continuity=1.0,
        num_distractors=5,
        contrasts=(6, 8, 4),
    ),
    128: Style(
        size=128,
        margins=(2, 3),
        length=5,
        thickness=3,
        radius=6,
        seed_distance=20,
        continuity=1.8,
        num_distractors=8,
        contrasts=(9, 9, 10),
    ),
}
"""By the width of a picture: Pathfinder and Path-X."""

BATCH = 1024
"""Pairs of contours that are tried at a time: of 32 x 32 pixels one in 25 grows to the end, of 128 x 128 one in 60."""


def _displacement(angle: Array, distance: float) -> Array:
    """[..., 2] (y, x), rounded up to whole pixels."""
    exact = distance * np.stack([np.sin(angle), np.cos(angle)], axis=-1)
    # whole numbers stay what they are, whatever the last digits of a sine
    return np.ceil(exact - 1e-9).astype(np.int64)


@functools.cache
def _lanczos(before: int, after: int) -> Array:
    """Weights [after, before] of 2^-15 that reduce a row of pixels with a Lanczos filter of three lobes."""
    scale = before / after
    centre = (np.arange(after) + 0.5) * scale
    x = (np.arange(before)[None, :] + 0.5 - centre[:, None]) / scale
    weights = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)
    weights /= weights.sum(axis=1, keepdims=True)
    return np.rint(weights * 2**15).astype(np.int64)


def _reduce(picture: Array, after: int) -> Array:
    """0 and `FULL` at the fine resolution to 0 ... `FULL` at the coarse one: along x first, rounded, then along y."""
    weights = _lanczos(picture.shape[0], after)
    rows = ((picture.astype(np.int64) @ weights.T + 2**14) >> 15).clip(0, FULL)
    return ((weights @ rows + 2**14) >> 15).clip(0, FULL).astype(np.uint8)


def _dash(reach: int, end: Array, thickness: int) -> Array:
    """A line from the centre of a fine picture to end (y, x) away: Bresenham's if it is one pixel thick, else a
    rectangle."""
    y, x = np.mgrid[-reach * FINE : reach * FINE + 1, -reach * FINE : reach * FINE + 1]
    dy, dx = int(end[0]), int(end[1])
    if thickness == 1:
        # along the longer axis and across it, both counted in the direction of the line
        y, x = y * (-1 if dy < 0 else 1), x * (-1 if dx < 0 else 1)
        (along, length), (across, rise) = (
            ((y, abs(dy)), (x, abs(dx))) if abs(dy) >= abs(dx) else ((x, abs(dx)), (y, abs(dy)))
        )
        off = 2 * (across * length - along * rise)
        inside = (off > -length) & (off <= length) & (along >= 0) & (along <= length)
    else:
        along, across, length = y * dy + x * dx, y * dx - x * dy, dy**2 + dx**2
        inside = (4 * across**2 <= thickness**2 * length) & (along >= 0) & (along <= length)
    return np.where(inside, FULL, 0).astype(np.uint8)


def _disk(radius: int) -> Array:
    """[P, 2] offsets of the pixels of a disk."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return np.argwhere(y**2 + x**2 <= radius**2) - radius


def _dilate(pictures: Array, offsets: Array) -> Array:
    """The maximum over shifts of [..., H, W]."""
    reach = int(np.abs(offsets).max())
    wide = np.pad(pictures, [(0, 0)] * (pictures.ndim - 2) + [(reach, reach)] * 2)
    height, width = pictures.shape[-2:]
    result = np.zeros_like(pictures)
    for y, x in offsets:
        np.maximum(result, wide[..., reach + y : reach + y + height, reach + x : reach + x + width], out=result)
    return result


@dataclass(frozen=True)
class _Tables:
    """All that can be known before a picture. Directions: 0 to 359 are degrees less 180, then one a place of the
    circle on which the next dash may end."""

    reach: int
    places: Array
    """[K, 2]: the circle's pixels around a joint."""
    weights: Array
    """[A, K]: of turning from a direction to a place, in 2^-12."""
    joint: Array
    """[A, 2]: from one joint to the next, along a direction."""
    first_joint: Array
    """[A, 2]: from the start of a contour to the joint behind it."""
    head: Array
    """[A, 2]: from the start of a dash to its other end."""
    dashes: Array
    """[A, S, S]: how a dash looks from its outer end."""
    masks: Array
    """[A, S, S]: what it and its clearance cover."""
    wide_masks: Array
    """[A, S + 2 m, S + 2 m]: the same, widened by the margin."""
    start_needs: Array
    """[360, P, 2]: pixels that must be free around a start; the first is repeated to fill up."""
    starts: Array
    """[360]: whether a contour may start in a direction."""
    first_directions: Array
    """Those in which the first contour may."""
    start_places: tuple[Array, ...]
    """For every degree, [n, 2]: where the first contour may start."""
    around: Array
    """[360, 2]: from the first start to the second."""


@functools.cache
def _tables(style: Style, margin: int) -> _Tables:
    reach, length = style.reach(margin), style.length
    radius = length + margin
    samples = np.deg2rad(np.arange(0, 360, 180 / (np.pi * radius)))
    circle = radius * np.stack([np.sin(samples), np.cos(samples)], axis=1)
    places = np.unique(np.floor(circle + 1e-9).astype(np.int64), axis=0)
    degrees = np.deg2rad(np.arange(-180, 180))
    turned = np.arctan2(places[:, 0], places[:, 1])
    directions = np.concatenate([degrees, turned])

    turn = np.abs(turned[None, :] - directions[:, None])
    turn = np.minimum(np.minimum(turn, 2 * np.pi - turn) * style.continuity, np.pi / 2)
    weights = np.rint(np.cos(turn) ** 2 * 2**12).astype(np.int64)

    # a first dash is drawn from its start along its direction, a later one from its head back
    drawn = np.concatenate([degrees, turned + np.pi])
    ends = _displacement(drawn, length * FINE)
    side = 2 * reach + 1
    fine = np.stack([_dash(reach, end, style.thickness) for end in ends])
    covered = _dilate(fine, _disk(margin * FINE))
    dashes = np.stack([_reduce(picture, side) for picture in fine])
    masks = np.stack([_reduce(picture, side) for picture in covered])
    wide = _dilate(np.pad(masks, ((0, 0), (margin, margin), (margin, margin))), _disk(margin))

    # the original looks one pixel down and right of where the dash will be
    shape = length + margin
    needs = [np.argwhere(mask == FULL) - reach for mask in masks[:360]]
    needs = [need[(np.abs(need + 1) <= shape).all(axis=1)] + 1 for need in needs]
    most = max(len(need) for need in needs)
    needs = [need if len(need) else np.zeros((1, 2), dtype=np.int64) for need in needs]
    start_needs = np.stack([np.concatenate([need, np.repeat(need[:1], most - len(need), axis=0)]) for need in needs])

    # the original gives up where any pixel of the picture, its corners too, would find all that it looks at outside
    corners = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
    starts = np.array([all((need * corner >= 0).all(axis=1).any() for corner in corners) for need in needs])
    border = 2 * style.seed_distance
    inner = np.zeros((style.size, style.size), dtype=bool)
    inner[border : style.size - border, border : style.size - border] = True
    start_places = []
    for need in start_needs:
        candidates = np.argwhere(inner)
        around = candidates[:, None] + need[None]
        start_places.append(candidates[inner[around[..., 0], around[..., 1]].all(axis=1)])
    roomy = np.array([len(found) > 0 for found in start_places])
    return _Tables(
        reach=reach,
        places=places,
        weights=weights,
        joint=_displacement(directions, length + 2 * margin),
        first_joint=_displacement(directions, length) + _displacement(directions + np.pi, length + margin),
        head=_displacement(directions, length),
        dashes=dashes,
        masks=masks,
        wide_masks=wide,
        start_needs=start_needs,
        starts=starts,
        first_directions=np.flatnonzero(starts & roomy),
        start_places=tuple(start_places),
        around=np.rint(
            style.seed_distance * np.stack([np.sin(degrees + np.pi), np.cos(degrees + np.pi)], axis=1) + 1e-9
        ).astype(np.int64),
    )


class _Canvas:
    """The masks of many pictures, with room around them so that no patch needs clipping."""

    def __init__(self, style: Style, margin: int, count: int) -> None:
        self.style, self.tables = style, _tables(style, margin)
        self.room = self.tables.reach + 2 * margin + style.length + 1
        self.inside = np.zeros((style.size + 2 * self.room,) * 2, dtype=bool)
        self.inside[self.room : -self.room, self.room : -self.room] = True
        mask = np.full((style.size, style.size), FULL, dtype=np.uint8)
        mask[style.padding : -style.padding, style.padding : -style.padding] = 0
        wide = _dilate(mask, _disk(margin))
        self.mask = np.repeat(np.pad(mask, self.room)[None], count, axis=0)
        """What is taken."""
        self.wide = np.repeat(np.pad(wide, self.room)[None], count, axis=0)
        """The same, widened by the margin: where no dash may end."""

    def patch(self, rows: Array, at: Array, side: int) -> tuple[Array, Array, Array]:
        """Index of square patches around pixels at [n, 2] of pictures rows [n]."""
        span = np.arange(side) - side // 2 + self.room
        return rows[:, None, None], (at[:, :1] + span)[:, :, None], (at[:, 1:] + span)[:, None, :]

    def take(self, rows: Array, directions: Array, at: Array) -> None:
        """Marks dashes as taken."""
        for canvas, stamps in ((self.mask, self.tables.masks), (self.wide, self.tables.wide_masks)):
            where = self.patch(rows, at, stamps.shape[1])
            stamp = stamps[directions] * self.inside[where[1], where[2]]
            canvas[where] = np.maximum(canvas[where], stamp)

    def extend(self, rng: np.random.Generator, rows: Array, joints: Array, directions: Array) -> _Step:
        """The next dash of one contour in every picture of rows: where its joint, head and direction are."""
        tables, size = self.tables, self.style.size
        joints = joints + tables.joint[directions]
        places = joints[:, None] + tables.places
        reachable = ((places >= 0) & (places < size)).all(axis=2)
        places = places.clip(-self.room, size + self.room - 1)
        free = FULL - self.wide[rows[:, None], places[..., 0] + self.room, places[..., 1] + self.room].astype(np.int64)
        cumulated = (tables.weights[directions] * free * reachable).cumsum(axis=1)
        total = cumulated[:, -1]
        # the original's smallest sum of probabilities, 1e-4
        found = np.zeros(len(rows), dtype=bool)
        able = total > 104
        chosen = np.zeros(len(rows), dtype=np.int64)
        for _ in range(TRIES):
            drawn = rng.integers(0, np.maximum(total, 1))
            trying = np.flatnonzero(able & ~found)
            if not len(trying):
                continue
            place = (cumulated[trying] > drawn[trying, None]).argmax(axis=1)
            at = joints[trying] + tables.places[place]
            where = self.patch(rows[trying], at, tables.masks.shape[1])
            stamp = tables.masks[360 + place] * self.inside[where[1], where[2]]
            clear = (self.mask[where].astype(np.int64) + stamp).max(axis=(1, 2)) < OVERLAP
            chosen[trying] = place
            found[trying[clear]] = True
        return _Step(found, joints, joints + tables.places[chosen], 360 + chosen)


@dataclass(frozen=True)
class _Step:
    found: Array
    joints: Array
    heads: Array
    directions: Array


@dataclass
class _Dashes:
    """Dashes of many pictures, to be drawn in the end: picture, pixel, direction."""

    rows: list[Array]
    at: list[Array]
    directions: list[Array]

    @classmethod
    def none(cls) -> _Dashes:
        return cls([], [], [])

    def add(self, rows: Array, at: Array, directions: Array) -> None:
        self.rows.append(rows)
        self.at.append(at)
        self.directions.append(directions)


def _inside(style: Style, *points: Array) -> Array:
    return np.logical_and.reduce([((point >= 0) & (point < style.size)).all(axis=1) for point in points])


def _two_contours(
    rng: np.random.Generator, canvas: _Canvas, count: int
) -> tuple[Array, list[list[tuple[Array, Array]]], Array, Array]:
    """Pictures in which both grew to the end; heads and directions of every dash; starts and ends [count, 2, 2]."""
    style, tables = canvas.style, canvas.tables
    directions = np.zeros((2, count), dtype=np.int64)
    directions[0] = tables.first_directions[rng.integers(0, len(tables.first_directions), count)]
    choice = rng.integers(0, 2**31, count)
    places = [tables.start_places[direction] for direction in directions[0]]
    first = np.array([place[c % len(place)] for place, c in zip(places, choice, strict=True)])
    second, placed = first.copy(), np.zeros(count, dtype=bool)
    for _ in range(TRIES):
        direction, around = rng.integers(0, 360, count), rng.integers(0, 360, count)
        at = first + tables.around[around]
        fits = ~placed & _inside(style, at, at + tables.head[direction], at + tables.first_joint[direction])
        second[fits], directions[1, fits] = at[fits], direction[fits]
        placed |= fits
    starts = np.stack([first, second])
    alive = placed & _inside(style, first + tables.head[directions[0]], first + tables.first_joint[directions[0]])

    rows = np.flatnonzero(alive)
    joints = starts + tables.first_joint[directions]
    heads, facing = starts.copy(), directions.copy()
    history: list[list[tuple[Array, Array]]] = [[(starts[i].copy(), directions[i].copy())] for i in range(2)]
    for _ in range(style.contour_length - 1):
        for i in range(2):
            step = canvas.extend(rng, rows, joints[i, rows], facing[i, rows])
            kept, rows = rows, rows[step.found]
            canvas.take(rows, facing[i, rows], heads[i, rows])
            for array, new in ((joints, step.joints), (heads, step.heads), (facing, step.directions)):
                array[i, kept] = new
            history[i].append((heads[i].copy(), facing[i].copy()))
    for i in range(2):
        canvas.take(rows, facing[i, rows], heads[i, rows])
    return rows, history, starts.transpose(1, 0, 2), heads.transpose(1, 0, 2)


def _short_contours(rng: np.random.Generator, canvas: _Canvas, rows: Array, dashes: _Dashes) -> None:
    """One short contour more in every picture of rows that has room for it."""
    for _ in range(DISTRACTOR_TRIES):
        if not len(rows):
            return
        trial = _Canvas.__new__(_Canvas)
        trial.__dict__ = {**canvas.__dict__, "mask": canvas.mask[rows], "wide": canvas.wide[rows]}
        done, parts = _short_contour(rng, trial)
        canvas.mask[rows[done]], canvas.wide[rows[done]] = trial.mask[done], trial.wide[done]
        for at, directions in parts:
            dashes.add(rows[done], at[done], directions[done])
        rows = np.delete(rows, done)


def _short_contour(rng: np.random.Generator, canvas: _Canvas) -> tuple[Array, list[tuple[Array, Array]]]:
    """One attempt in every picture: which have succeeded, and heads and directions of their dashes."""
    style, tables, room = canvas.style, canvas.tables, canvas.room
    count, size = len(canvas.mask), canvas.style.size
    start, direction = np.zeros((count, 2), dtype=np.int64), np.zeros(count, dtype=np.int64)
    placed, crowded = np.zeros(count, dtype=bool), np.zeros(count, dtype=bool)
    taken = canvas.mask > OCCUPIED
    for _ in range(TRIES):
        directions, drawn = rng.integers(0, 360, count), rng.integers(0, 2**62, count)
        crowded |= ~placed & ~tables.starts[directions]
        trying = np.flatnonzero(~placed & ~crowded)
        if not len(trying):
            continue
        needs = tables.start_needs[directions[trying]]
        blocked = np.zeros((len(trying), size, size), dtype=bool)
        for row, offsets, found in zip(trying, needs, blocked, strict=True):
            for y, x in offsets.tolist():
                found |= taken[row, room + y : room + y + size, room + x : room + x + size]
        free = ~blocked.reshape(len(trying), -1)
        number_free = free.sum(axis=1)
        crowded[trying[number_free == 0]] = True
        wanted = drawn[trying] % np.maximum(number_free, 1)
        place = (free.cumsum(axis=1) > wanted[:, None]).argmax(axis=1)
        at = np.stack([place // size, place % size], axis=1)
        turned = directions[trying]
        fits = (number_free > 0) & _inside(style, at + tables.head[turned], at + tables.first_joint[turned])
        start[trying[fits]], direction[trying[fits]] = at[fits], turned[fits]
        placed[trying[fits]] = True
    rows = np.flatnonzero(placed)
    joints, heads, facing = start + tables.first_joint[direction], start.copy(), direction.copy()
    parts = [(start, direction)]
    for _ in range(style.distractor_length - 1):
        step = canvas.extend(rng, rows, joints[rows], facing[rows])
        kept, rows = rows, rows[step.found]
        canvas.take(rows, facing[rows], heads[rows])
        joints[kept], heads[kept], facing[kept] = step.joints, step.heads, step.directions
        parts.append((heads.copy(), facing.copy()))
    canvas.take(rows, facing[rows], heads[rows])
    return rows, parts


@functools.cache
def _dot(radius: int) -> Array:
    """A dot, bright at its centre; its corner pixel is that of the fine picture."""
    reach = math.ceil(radius / FINE) + 3
    y, x = np.mgrid[-reach * FINE : (reach + 1) * FINE, -reach * FINE : (reach + 1) * FINE]
    return _reduce(np.where(y**2 + x**2 <= radius**2, FULL, 0), 2 * reach + 1)


def _draw(canvas: _Canvas, picture: Array, dashes: _Dashes, contrast: int) -> None:
    for rows, at, directions in zip(dashes.rows, dashes.at, dashes.directions, strict=True):
        where = canvas.patch(rows, at, canvas.tables.dashes.shape[1])
        picture[where] = np.maximum(picture[where], canvas.tables.dashes[directions].astype(np.int16) * contrast)


def draw(seed: int, size: int, margin: int, index: int) -> tuple[Array, Array]:
    """Pictures [R, size * size] and labels [R] of one batch of a stream; R is how many pairs grew to the end."""
    style = STYLES[size]
    rng = numpy_generator(seed, f"contours/{size}/{margin}", index)
    canvas = _Canvas(style, margin, BATCH)
    rows, history, starts, ends = _two_contours(rng, canvas, BATCH)
    canvas.mask, canvas.wide = canvas.mask[rows], canvas.wide[rows]
    starts, ends = starts[rows], ends[rows]
    long, short = _Dashes.none(), _Dashes.none()
    everyone = np.arange(len(rows))
    for contour in history:
        for at, directions in contour:
            long.add(everyone, at[rows], directions[rows])
    for _ in range(style.num_distractors):
        _short_contours(rng, canvas, everyone, short)
    picture = np.zeros((len(rows), *canvas.inside.shape), dtype=np.int16)
    _draw(canvas, picture, long, style.contrasts[0])
    _draw(canvas, picture, short, style.contrasts[1])
    labels, origin = rng.integers(0, 2, len(rows)), rng.integers(0, 2, len(rows))
    terminal = np.where(labels == 1, origin, 1 - origin)
    dot = _dot(style.radius).astype(np.int16) * style.contrasts[2]
    for at in (starts[everyone, origin], ends[everyone, terminal]):
        where = canvas.patch(everyone, at, dot.shape[0])
        picture[where] = np.maximum(picture[where], dot)
    room = canvas.room
    flat = picture[:, room:-room, room:-room].reshape(len(rows), style.size**2).astype(np.int64)
    brightest = np.maximum(flat.max(axis=1, keepdims=True), 1)
    # x / brightest * 255, halves up
    return ((flat * 2 * FULL + brightest) // (2 * brightest)).astype(np.uint8), labels.astype(np.int8)
