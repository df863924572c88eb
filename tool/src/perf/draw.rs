//! The picture of a benchmark: a line for each row, on the left how many times as fast each way is as the first one, on the right
//! how long its calls took.

use super::figures::{Figures, Latency, Row};
use crate::picture::{Anchor, Picture, Style, colour, width};

/// One for each way, in order.
const COLOURS: [&str; 5] = [colour::FAINT, colour::BLUE, colour::ORANGE, colour::GREEN, colour::PURPLE];

const LABEL: Style = Style::new(12.0, colour::INK);
const SMALL: Style = Style::new(11.0, colour::FAINT);

const WIDTH: f64 = 960.0;
const LEFT: f64 = 20.0;
/// Bars begin here.
const RATIOS: f64 = 190.0;
const RATIOS_WIDE: f64 = 300.0;
const TIMES: f64 = 570.0;
const TIMES_WIDE: f64 = 360.0;
const BAR: f64 = 9.0;
const GAP: f64 = 9.0;

/// Draws it.
pub fn draw(figures: &Figures) -> Picture {
    let others = figures.ways.len().saturating_sub(1);
    let ways = figures.ways.len().clamp(1, COLOURS.len());
    let each = ways as f64 * BAR + GAP;
    let head = 118.0 + figures.notes.len() as f64 * 16.0;
    let height = head + figures.rows.len() as f64 * each + 62.0;
    let mut picture = Picture::new(WIDTH, height, &figures.title);
    picture.text(LEFT, 30.0, Style::new(17.0, colour::INK).bold(), &figures.title);
    for (at, note) in figures.notes.iter().enumerate() {
        picture.text(LEFT, 50.0 + at as f64 * 16.0, SMALL, note);
    }
    legend(&mut picture, figures, head - 52.0);

    let bottom = head + figures.rows.len() as f64 * each;
    let first = figures.ways.first().map_or("", |way| &way.name);
    let most = figures
        .rows
        .iter()
        .flat_map(|row| figures.ways.iter().filter_map(|way| row.ratio(first, &way.name)))
        .fold(1.0, f64::max);
    let step = step(most / 5.0);
    let full = (most / step).ceil() * step;
    let ratio_x = |ratio: f64| RATIOS + ratio / full * RATIOS_WIDE;
    picture.text(RATIOS, head - 22.0, LABEL.bold(), &format!("calls per second, {first} = 1"));
    let mut tick = 0.0;
    while tick <= full * 1.001 {
        picture.line((ratio_x(tick), head - 4.0), (ratio_x(tick), bottom), colour::RULE, 1.0, false);
        picture.text(ratio_x(tick), bottom + 16.0, SMALL.at(Anchor::Middle), &number(tick));
        tick += step;
    }

    picture.line((ratio_x(1.0), head - 4.0), (ratio_x(1.0), bottom), colour::INK, 1.2, true);

    let (low, high) = decades(&figures.rows);
    let time_x = |us: f64| TIMES + (us.log10() - low) / (high - low) * TIMES_WIDE;
    picture.text(TIMES, head - 22.0, LABEL.bold(), "time of a call: p10 to p90, p50 (bar), p99 (line's end)");
    let mut decade = low;
    while decade <= high + 0.001 {
        let x = time_x(10f64.powf(decade));
        picture.line((x, head - 4.0), (x, bottom), colour::RULE, 1.0, false);
        picture.text(x, bottom + 16.0, SMALL.at(Anchor::Middle), &microseconds(10f64.powf(decade)));
        decade += 1.0;
    }

    for (at, row) in figures.rows.iter().enumerate() {
        let y = head + at as f64 * each + GAP / 2.0;
        if at % 2 == 0 {
            let band = (WIDTH - LEFT - 14.0, each);
            // It covers no rules: it is drawn before the marks, and is hardly darker than white.
            picture.box_(
                (LEFT - 6.0, y - GAP / 2.0),
                (band.0 - (WIDTH - RATIOS) + 20.0, band.1),
                colour::PALE,
                None,
                3.0,
            );
        }
        picture.text(RATIOS - 12.0, y + ways as f64 * BAR / 2.0 + 4.0, LABEL.at(Anchor::End), &row.label());
        for (which, way) in figures.ways.iter().take(COLOURS.len()).enumerate() {
            let line = y + which as f64 * BAR;
            if let Some(ratio) = row.ratio(first, &way.name).filter(|_| which > 0) {
                // The bars of the other ways share the room of the first one, which has no bar.
                let thick = BAR * ways as f64 / others.max(1) as f64;
                let top = y + (which - 1) as f64 * thick;
                let end = ratio_x(ratio);
                picture.box_((RATIOS, top), (end - RATIOS, thick - 1.5), COLOURS[which], None, 1.5);
                // Beside the line for the first one, not on it.
                let right = width(&format!("{ratio:.2}"), 10.0) + 6.0;
                let mark = ratio_x(1.0);
                let text = if end < mark && end + right > mark { mark } else { end };
                picture.text(
                    text + 4.0,
                    top + thick / 2.0 + 3.2,
                    Style::new(10.0, colour::INK),
                    &format!("{ratio:.2}"),
                );
            }
            if let Some(found) = row.ways.get(&way.name) {
                spread(&mut picture, &found.latency_us, line + BAR / 2.0, COLOURS[which], &time_x);
            }
        }
    }
    picture
}

fn legend(picture: &mut Picture, figures: &Figures, y: f64) {
    let mut x = LEFT;
    for (way, colour) in figures.ways.iter().zip(COLOURS) {
        picture.box_((x, y - 9.0), (11.0, 11.0), colour, None, 2.0);
        let text = if way.what.is_empty() { way.name.clone() } else { format!("{}: {}", way.name, way.what) };
        picture.text(x + 16.0, y, LABEL, &text);
        x += width(&text, LABEL.size) + 40.0;
    }
}

/// Draws what is known of how the calls' times are spread, around a level line.
fn spread(picture: &mut Picture, times: &Latency, y: f64, colour: &str, x: &impl Fn(f64) -> f64) {
    let known = |time: Option<f64>| time.filter(|time| time.is_finite() && *time > 0.0).map(x);
    let Some(middle) = known(times.p50) else { return };
    let (low, high) = (known(times.p10).unwrap_or(middle), known(times.p90).unwrap_or(middle));
    if let Some(end) = known(times.p99) {
        picture.line((high, y), (end, y), colour, 1.2, false);
        picture.line((end, y - 2.5), (end, y + 2.5), colour, 1.2, false);
    }
    picture.box_((low, y - 2.5), ((high - low).max(1.0), 5.0), colour, None, 1.0);
    picture.box_((middle - 1.5, y - 4.0), (3.0, 8.0), colour, None, 0.5);
}

/// The powers of ten microseconds that all times lie between.
fn decades(rows: &[Row]) -> (f64, f64) {
    let times = rows.iter().flat_map(|row| row.ways.values()).flat_map(|found| {
        let Latency { p10, p50, p90, p99, .. } = found.latency_us;
        [p10, p50, p90, p99].into_iter().flatten()
    });
    let (mut least, mut most) = (f64::MAX, f64::MIN);
    for time in times.filter(|time| time.is_finite() && *time > 0.0) {
        (least, most) = (least.min(time), most.max(time));
    }
    if least > most {
        return (0.0, 1.0);
    }
    // Nobody's call takes less than a picosecond or more than an age.
    let (low, high) = (least.log10().floor().max(-6.0), most.log10().ceil().min(15.0));
    (low, high.max(low + 1.0))
}

/// 1, 2 or 5 times a power of ten, and at least `least`.
fn step(least: f64) -> f64 {
    let power = 10f64.powf(least.max(0.01).log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= least).unwrap_or(10.0 * power)
}

fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn microseconds(us: f64) -> String {
    match us {
        us if us >= 999_999.0 => format!("{} s", number(us / 1e6)),
        us if us >= 999.0 => format!("{} ms", number(us / 1e3)),
        us => format!("{} \u{b5}s", number(us)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::perf::figures::{Measured, Way};

    #[test]
    fn whatever_the_figures_are_the_picture_is_one() {
        let mut figures = Figures { title: "t".into(), ..Figures::default() };
        let is_one = |figures: &Figures| {
            let text = draw(figures).to_string();
            assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
            assert!(text.len() < 100_000);
        };
        is_one(&figures);
        figures.ways = ["tcp", "a", "b", "c", "d", "e"]
            .map(|name| Way { name: name.into(), what: String::new() })
            .into();
        for value in [0.0, -1.0, 1e-300, 1.0, 1e300, f64::MAX] {
            let latency_us =
                Latency { p10: Some(value), p50: Some(value), p99: Some(value), ..Latency::default() };
            let found = Measured { calls_per_second: value, latency_us, ..Measured::default() };
            let mut row = Row { call: "x".into(), ..Row::default() };
            for way in &figures.ways {
                row.ways.insert(way.name.clone(), found.clone());
            }
            row.ways.insert("a".into(), Measured { calls_per_second: 2.0, ..found });
            figures.rows.push(row);
            is_one(&figures);
        }
    }

    #[test]
    fn a_ratio_does_not_stand_on_the_line_of_the_first_way() {
        let ways = ["tcp", "a"].map(|name| Way { name: name.into(), what: String::new() });
        let mut figures = Figures { title: "t".into(), ways: ways.into(), ..Figures::default() };
        for calls_per_second in [0.66, 20.0] {
            let mut row = Row { call: "x".into(), ..Row::default() };
            row.ways.insert("tcp".into(), Measured { calls_per_second: 1.0, ..Measured::default() });
            row.ways.insert("a".into(), Measured { calls_per_second, ..Measured::default() });
            figures.rows.push(row);
        }
        let text = draw(&figures).to_string();
        let place = |element: &str, attribute: &str| {
            let rest = element.split(&format!(" {attribute}=\"")).nth(1).unwrap();
            rest.split('"').next().unwrap().parse::<f64>().unwrap()
        };
        let line = text.split('<').find(|element| element.contains("stroke-dasharray")).unwrap();
        let label = text.split('<').find(|element| element.contains("\n0.66\n")).unwrap();
        assert!(place(label, "x") > place(line, "x1"), "{label} {line}");
    }

    #[test]
    fn steps_of_a_scale_are_round() {
        assert_eq!([0.3, 1.0, 1.1, 3.0, 7.0, 42.0].map(step), [0.5, 1.0, 2.0, 5.0, 10.0, 50.0]);
    }
}
