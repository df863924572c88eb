//! Pictures: an SVG of lines, boxes, arrows and words on white, which any viewer shows with its own sans-serif font.
//!
//! It knows nothing of what is drawn. The width of words is estimated, not measured: [`width`] is on the safe side.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use svg::Document;
use svg::node::element::{Group, Line, Polygon, Rectangle, Text, Title};

use crate::words::shown;

/// Colours that differ in brightness too.
pub mod colour {
    pub const INK: &str = "#1f2933";
    pub const FAINT: &str = "#66727f";
    pub const RULE: &str = "#d5dbe1";
    pub const PALE: &str = "#f2f5f8";
    pub const BLUE: &str = "#1d5fa8";
    pub const ORANGE: &str = "#c2570c";
    pub const GREEN: &str = "#2e7d4f";
    pub const PURPLE: &str = "#7a4699";
    pub const RED: &str = "#b3261e";
}

/// Where words stand relative to their point.
#[derive(Clone, Copy)]
pub enum Anchor {
    Start,
    Middle,
    End,
}

/// Words and how they look.
#[derive(Clone, Copy)]
pub struct Style {
    pub size: f64,
    pub colour: &'static str,
    pub anchor: Anchor,
    pub bold: bool,
}

impl Style {
    pub const fn new(size: f64, colour: &'static str) -> Style {
        Style { size, colour, anchor: Anchor::Start, bold: false }
    }

    pub const fn at(self, anchor: Anchor) -> Style {
        Style { anchor, ..self }
    }

    pub const fn bold(self) -> Style {
        Style { bold: true, ..self }
    }
}

/// About how wide words are.
pub fn width(text: &str, size: f64) -> f64 {
    text.chars().count() as f64 * size * 0.56
}

/// A picture under construction.
pub struct Picture {
    document: Document,
}

impl Picture {
    /// An empty picture, with what it shows in words for those who cannot see it.
    pub fn new(width: f64, height: f64, title: &str) -> Picture {
        let document = Document::new()
            .set("viewBox", format!("0 0 {width:.0} {height:.0}"))
            .set("width", format!("{width:.0}"))
            .set("height", format!("{height:.0}"))
            .set("role", "img")
            .set("font-family", "system-ui, 'Segoe UI', 'DejaVu Sans', Helvetica, Arial, sans-serif")
            .add(Title::new(shown(title)))
            .add(Rectangle::new().set("width", "100%").set("height", "100%").set("fill", "#ffffff"));
        Picture { document }
    }

    fn add(&mut self, node: impl Into<Box<dyn svg::Node>>) {
        svg::Node::append(&mut self.document, node);
    }

    pub fn text(&mut self, x: f64, y: f64, style: Style, text: &str) {
        let anchor = match style.anchor {
            Anchor::Start => "start",
            Anchor::Middle => "middle",
            Anchor::End => "end",
        };
        let mut node = Text::new(shown(text))
            .set("x", round(x))
            .set("y", round(y))
            .set("font-size", round(style.size))
            .set("fill", style.colour)
            .set("text-anchor", anchor);
        if style.bold {
            node = node.set("font-weight", "bold");
        }
        self.add(node);
    }

    /// From point to point, dashed or not.
    pub fn line(&mut self, from: (f64, f64), to: (f64, f64), colour: &str, thickness: f64, dashed: bool) {
        self.add(line(from, to, colour, thickness, dashed));
    }

    pub fn box_(
        &mut self,
        at: (f64, f64),
        size: (f64, f64),
        fill: &str,
        border: Option<&str>,
        round_by: f64,
    ) {
        let mut node = Rectangle::new()
            .set("x", round(at.0))
            .set("y", round(at.1))
            .set("width", round(size.0.max(0.0)))
            .set("height", round(size.1.max(0.0)))
            .set("rx", round(round_by))
            .set("fill", fill);
        if let Some(border) = border {
            node = node.set("stroke", border).set("stroke-width", 1);
        }
        self.add(node);
    }

    /// A level or sloping arrow, with a head at its end.
    pub fn arrow(&mut self, from: (f64, f64), to: (f64, f64), colour: &str, thickness: f64, dashed: bool) {
        let (dx, dy) = (to.0 - from.0, to.1 - from.1);
        let length = dx.hypot(dy).max(1.0);
        let (ux, uy) = (dx / length, dy / length);
        let (long, half) = (7.0 + 1.5 * thickness, 3.0 + thickness);
        let base = (to.0 - ux * long, to.1 - uy * long);
        let points = [to, (base.0 - uy * half, base.1 + ux * half), (base.0 + uy * half, base.1 - ux * half)];
        let points: Vec<String> = points.iter().map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
        let head = Polygon::new().set("points", points.join(" ")).set("fill", colour);
        self.add(Group::new().add(line(from, base, colour, thickness, dashed)).add(head));
    }

    /// Writes it to a file.
    ///
    /// # Errors
    /// Of the file.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        fs::write(path, self.to_string())
    }
}

/// Checks that a picture could be saved there, before what it shows is measured. An existing file stays as it is, and none
/// is left behind where there was none.
///
/// # Errors
/// It could not be saved.
pub fn can_be_saved(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        // Opening a pipe would wait.
        Ok(there) if there.file_type().is_fifo() => Ok(()),
        Ok(_) => OpenOptions::new().write(true).open(path).map(drop),
        Err(error) if error.kind() == io::ErrorKind::NotFound => match File::create_new(path) {
            Ok(_) => fs::remove_file(path),
            // A link, whose target would be created.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            Err(error) => Err(error),
        },
        Err(error) => Err(error),
    }
}

impl std::fmt::Display for Picture {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}", self.document)
    }
}

fn line(from: (f64, f64), to: (f64, f64), colour: &str, thickness: f64, dashed: bool) -> Line {
    let node = Line::new()
        .set("x1", round(from.0))
        .set("y1", round(from.1))
        .set("x2", round(to.0))
        .set("y2", round(to.1))
        .set("stroke", colour)
        .set("stroke-width", round(thickness));
    if dashed { node.set("stroke-dasharray", "4 3") } else { node }
}

fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_picture_can_be_saved_is_known_before_and_nothing_changes() {
        let folder = std::env::temp_dir().join(format!("rpcrdma-picture.{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let file = folder.join("a.svg");
        can_be_saved(&file).unwrap();
        assert!(!file.exists());
        fs::write(&file, "there").unwrap();
        can_be_saved(&file).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "there");
        let link = folder.join("link");
        std::os::unix::fs::symlink("b.svg", &link).unwrap();
        can_be_saved(&link).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink() && !folder.join("b.svg").exists());
        for (path, why) in [
            (folder.clone(), io::ErrorKind::IsADirectory),
            (folder.join("none/a.svg"), io::ErrorKind::NotFound),
            (file.join("a.svg"), io::ErrorKind::NotADirectory),
        ] {
            assert_eq!(can_be_saved(&path).unwrap_err().kind(), why);
        }
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn no_text_of_others_is_markup_or_moves_a_cursor() {
        let mut picture = Picture::new(10.0, 10.0, "a<b>&\u{1b}[2J");
        picture.text(0.0, 0.0, Style::new(9.0, colour::INK), "</text><script>\u{202e}x\r\n\u{7}");
        let text = picture.to_string();
        assert!(!text.contains("<script") && text.contains("&lt;script&gt;"), "{text}");
        assert!(text.chars().all(|c| c == '\n' || !c.is_control() && c != '\u{202e}'), "{text}");
    }
}
