"""Pictures of two long dashed contours among short ones, with two dots on the same long contour or one on each.

The procedure is that of the Pathfinder challenge (Linsley et al. 2018; Kim et al. 2020), with the settings of LRA for
contours of 14 dashes. It is written for many pictures at a time:

1. Two contours start near the middle, `seed_distance` apart, and grow in turn by one dash. The next dash ends on a
   circle around the end of the last one. Its direction is drawn with probability proportional to
   cos²(min(continuity |turn|, π/2)) among the places that keep `margin` pixels from everything older. A pair in which a
   contour cannot grow to its full length is given up.
2. `num_distractors` short contours are put where there is room, with five attempts each.
3. One dot marks the start of a long contour. The other marks the end of the same contour (label 1) or of the other one
   (label 0).
4. Dashes are drawn at twice the resolution and reduced with a Lanczos filter. Where they overlap the maximum counts,
   and the picture is stretched to 0 ... 255.

Every decision is made by integer arithmetic on tables, so that a seed gives the same bytes on every machine.

Departures from the original: thick dashes are drawn as exact rectangles instead of by an image library. Pictures are
drawn in batches, so random draws come in another order. Distractors also keep away from the last dash of the first
contour.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.suite.rng import numpy_generator

# not imported from tasks.base, so that a process that only generates starts without loading torch
Array = NDArray[Any]

FINE = 2
"""Factor of the resolution at which dashes and dots are drawn, the fine resolution."""
FULL = 255
"""Value of a pixel that is fully covered."""
OVERLAP = 459
"""Two masks overlap where their sum reaches this value, 1.8 in units of `FULL`."""
OCCUPIED = 76
"""A pixel is occupied where its mask is above this value, 0.3 in units of `FULL`."""
TRIES, DISTRACTOR_TRIES = 3, 5
"""Number of draws for one dash, and of attempts for one short contour."""
CONTOUR_LENGTH, DISTRACTOR_LENGTH = 14, 4
"""Number of dashes of a long contour and of a short one."""


@dataclass(frozen=True)
class Style:
    """The settings for one size of pictures. Lengths are in pixels; contrasts are relative to each other."""

    size: int
    margins: tuple[int, ...]
    """Clearances of dashes, of which one is drawn for every picture."""
    length: int
    """Length of a dash."""
    thickness: int
    """Thickness of a dash, at the fine resolution."""
    radius: int
    """Radius of a dot, at the fine resolution."""
    seed_distance: int
    """Distance between the starts of the two long contours."""
    continuity: float
    """Strength with which a contour avoids changes of direction."""
    num_distractors: int
    contrasts: tuple[int, int, int]
    """Contrasts of the two long contours, of the short ones and of the dots."""

    def reach(self, margin: int) -> int:
        """Maximum distance of a dash, with its clearance, from its start."""
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
"""The settings by the width of a picture: 32 for Pathfinder and 128 for Path-X."""

BATCH = 1024
"""Number of pairs of contours that are tried at a time. One in 25 grows to its full length with 32 x 32 pixels, and one
in 60 with 128 x 128."""


def _displacement(angle: Array, distance: float) -> Array:
    """The displacement (y, x) [..., 2] over a distance at angles [...], rounded up to whole pixels."""
    exact = distance * np.stack([np.sin(angle), np.cos(angle)], axis=-1)
    # the small offset prevents that rounding errors in the last digits of a sine round an integer up
    return np.ceil(exact - 1e-9).astype(np.int64)


@functools.cache
def _lanczos(before: int, after: int) -> Array:
    """Weights [after, before], in units of 2^-15, that reduce a row of pixels with a Lanczos filter of three lobes."""
    scale = before / after
    centre = (np.arange(after) + 0.5) * scale
    x = (np.arange(before)[None, :] + 0.5 - centre[:, None]) / scale
    weights = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)
    weights /= weights.sum(axis=1, keepdims=True)
    return np.rint(weights * 2**15).astype(np.int64)


def _reduce(picture: Array, after: int) -> Array:
    """Reduces a picture from the fine resolution to `after` pixels a side: along x first, rounded, and then along y."""
    weights = _lanczos(picture.shape[0], after)
    rows = ((picture.astype(np.int64) @ weights.T + 2**14) >> 15).clip(0, FULL)
    return ((weights @ rows + 2**14) >> 15).clip(0, FULL).astype(np.uint8)


def _dash(reach: int, end: Array, thickness: int) -> Array:
    """A dash from the centre of a fine picture by the displacement end (y, x), 0 or `FULL`.

    It is Bresenham's line where it is one pixel thick, and a rectangle otherwise.
    """
    y, x = np.mgrid[-reach * FINE : reach * FINE + 1, -reach * FINE : reach * FINE + 1]
    dy, dx = int(end[0]), int(end[1])
    if thickness == 1:
        # distances along the longer axis and across it, in the direction of the line
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
    """Offsets [P, 2] of the pixels of a disk from its centre."""
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    return np.argwhere(y**2 + x**2 <= radius**2) - radius


def _dilate(pictures: Array, offsets: Array) -> Array:
    """The maximum of pictures [..., height, width] over shifts by these offsets."""
    reach = int(np.abs(offsets).max())
    wide = np.pad(pictures, [(0, 0)] * (pictures.ndim - 2) + [(reach, reach)] * 2)
    height, width = pictures.shape[-2:]
    result = np.zeros_like(pictures)
    for y, x in offsets:
        np.maximum(result, wide[..., reach + y : reach + y + height, reach + x : reach + x + width], out=result)
    return result


@dataclass(frozen=True)
class _Tables:
    """Everything that can be computed before any picture, indexed by direction.

    Directions 0 to 359 are the degrees -180 to 179. Then there is one direction for every place of the circle on which
    the next dash may end. A = 360 + K is the number of directions, K of places, S the side of a patch and m the margin.
    """

    reach: int
    places: Array
    """[K, 2]: the pixels of the circle, relative to a joint."""
    weights: Array
    """[A, K]: weight of turning from a direction to a place, in units of 2^-12."""
    joint: Array
    """[A, 2]: displacement from one joint to the next along a direction."""
    first_joint: Array
    """[A, 2]: displacement from the start of a contour to the joint behind it."""
    head: Array
    """[A, 2]: displacement from the start of a dash to its other end."""
    dashes: Array
    """[A, S, S]: picture of a dash, centred at its outer end."""
    masks: Array
    """[A, S, S]: what a dash and its clearance cover."""
    wide_masks: Array
    """[A, S + 2 m, S + 2 m]: the same, widened by the margin."""
    start_needs: Array
    """[360, P, 2]: pixels that must be free around a start. Where there are fewer than P, the first one is repeated."""
    starts: Array
    """[360]: whether a short contour may start in a direction."""
    first_directions: Array
    """Directions in which the first long contour may start."""
    start_places: tuple[Array, ...]
    """[n, 2] for every degree: places at which the first long contour may start."""
    around: Array
    """[360, 2]: displacement from the start of the first long contour to that of the second."""


@functools.cache
def _tables(style: Style, margin: int) -> _Tables:
    """The tables of one style and margin, computed once per process."""
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

    # the first dash of a contour is drawn from its start along its direction, a later one from its head backwards
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

    # the original gives up where at any pixel, corners included, all the pixels that must be free are outside
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
    """The masks of many pictures, with a border wide enough that no patch needs clipping."""

    def __init__(self, style: Style, margin: int, count: int) -> None:
        self.style, self.tables = style, _tables(style, margin)
        self.room = self.tables.reach + 2 * margin + style.length + 1
        self.inside = np.zeros((style.size + 2 * self.room,) * 2, dtype=bool)
        self.inside[self.room : -self.room, self.room : -self.room] = True
        mask = np.full((style.size, style.size), FULL, dtype=np.uint8)
        # a border of one pixel stays free
        mask[1:-1, 1:-1] = 0
        wide = _dilate(mask, _disk(margin))
        self.mask = np.repeat(np.pad(mask, self.room)[None], count, axis=0)
        """The pixels that dashes and their clearances cover."""
        self.wide = np.repeat(np.pad(wide, self.room)[None], count, axis=0)
        """The same, widened by the margin: no dash may end here."""

    def select(self, rows: Array) -> _Canvas:
        """A canvas with copies of the pictures rows [n]."""
        selected = copy.copy(self)
        selected.mask, selected.wide = self.mask[rows], self.wide[rows]
        return selected

    def patch(self, rows: Array, at: Array, side: int) -> tuple[Array, Array, Array]:
        """The index of square patches around the pixels at [n, 2], in the pictures rows [n]."""
        span = np.arange(side) - side // 2 + self.room
        return rows[:, None, None], (at[:, :1] + span)[:, :, None], (at[:, 1:] + span)[:, None, :]

    def take(self, rows: Array, directions: Array, at: Array) -> None:
        """Adds dashes and their clearances to the masks."""
        for canvas, stamps in ((self.mask, self.tables.masks), (self.wide, self.tables.wide_masks)):
            where = self.patch(rows, at, stamps.shape[1])
            stamp = stamps[directions] * self.inside[where[1], where[2]]
            canvas[where] = np.maximum(canvas[where], stamp)

    def extend(self, rng: np.random.Generator, rows: Array, joints: Array, directions: Array) -> _Step:
        """Draws the next dash of one contour in every picture of rows: its joint, head and direction."""
        tables, size = self.tables, self.style.size
        joints = joints + tables.joint[directions]
        places = joints[:, None] + tables.places
        reachable = ((places >= 0) & (places < size)).all(axis=2)
        places = places.clip(-self.room, size + self.room - 1)
        free = FULL - self.wide[rows[:, None], places[..., 0] + self.room, places[..., 1] + self.room].astype(np.int64)
        cumulated = (tables.weights[directions] * free * reachable).cumsum(axis=1)
        total = cumulated[:, -1]
        # the smallest sum of probabilities that the original accepts, 1e-4, in the units used here
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
    """The next dash of one contour in many pictures, and whether a place was found for it."""

    found: Array
    joints: Array
    heads: Array
    directions: Array


@dataclass
class _Dashes:
    """The dashes of many pictures, to be drawn at the end: picture, pixel and direction."""

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
    """Whether all of these points [n, 2] lie inside the picture: [n]."""
    return np.logical_and.reduce([((point >= 0) & (point < style.size)).all(axis=1) for point in points])


def _two_contours(
    rng: np.random.Generator, canvas: _Canvas, count: int
) -> tuple[Array, list[list[tuple[Array, Array]]], Array, Array]:
    """Grows two long contours in every picture.

    Gives the pictures in which both reached their full length, heads and directions of every dash of either contour,
    and starts and ends [count, 2, 2].
    """
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
    for _ in range(CONTOUR_LENGTH - 1):
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
    """Adds one short contour to every picture of rows that has room for it."""
    for _ in range(DISTRACTOR_TRIES):
        if not len(rows):
            return
        trial = canvas.select(rows)
        done, parts = _short_contour(rng, trial)
        canvas.mask[rows[done]], canvas.wide[rows[done]] = trial.mask[done], trial.wide[done]
        for at, directions in parts:
            dashes.add(rows[done], at[done], directions[done])
        rows = np.delete(rows, done)


def _short_contour(rng: np.random.Generator, canvas: _Canvas) -> tuple[Array, list[tuple[Array, Array]]]:
    """Tries a short contour in every picture; returns which succeeded, and heads and directions of their dashes."""
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
    for _ in range(DISTRACTOR_LENGTH - 1):
        step = canvas.extend(rng, rows, joints[rows], facing[rows])
        kept, rows = rows, rows[step.found]
        canvas.take(rows, facing[rows], heads[rows])
        joints[kept], heads[kept], facing[kept] = step.joints, step.heads, step.directions
        parts.append((heads.copy(), facing.copy()))
    canvas.take(rows, facing[rows], heads[rows])
    return rows, parts


@functools.cache
def _dot(radius: int) -> Array:
    """A dot, bright at its centre. It is centred at the corner of a pixel, as in the fine picture."""
    reach = math.ceil(radius / FINE) + 3
    y, x = np.mgrid[-reach * FINE : (reach + 1) * FINE, -reach * FINE : (reach + 1) * FINE]
    return _reduce(np.where(y**2 + x**2 <= radius**2, FULL, 0), 2 * reach + 1)


def _draw(canvas: _Canvas, picture: Array, dashes: _Dashes, contrast: int) -> None:
    """Draws dashes into pictures, where the brighter value counts."""
    for rows, at, directions in zip(dashes.rows, dashes.at, dashes.directions, strict=True):
        where = canvas.patch(rows, at, canvas.tables.dashes.shape[1])
        picture[where] = np.maximum(picture[where], canvas.tables.dashes[directions].astype(np.int16) * contrast)


def draw(seed: int, size: int, margin: int, index: int) -> tuple[Array, Array]:
    """Pictures [R, size * size] and labels [R] of one batch of a stream; R pairs of contours reached their full
    length."""
    style = STYLES[size]
    rng = numpy_generator(seed, f"contours/{size}/{margin}", index)
    canvas = _Canvas(style, margin, BATCH)
    rows, history, starts, ends = _two_contours(rng, canvas, BATCH)
    canvas = canvas.select(rows)
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
    # x / brightest * 255, with halves rounded up
    return ((flat * 2 * FULL + brightest) // (2 * brightest)).astype(np.uint8), labels.astype(np.int8)
