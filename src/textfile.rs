//! Text files that people write for this library: how they are read, and the words in them.
//!
//! Owns what settings and bindings have in common: opening a file so that a wrong path leads to nothing but an error,
//! comments, numbers, sizes, and how a value is quoted in an error. Leaves what the words mean to `config` and `binding`.
//!
//! # Invariants
//! - Only regular files are read. A FIFO would hold up the program for ever, and opening some devices has side effects.
//! - At most [`MAX`] bytes are read, and what is quoted of a text is short and visible, whatever it holds.
#![forbid(unsafe_code)]

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

use crate::error::{Error, Kind, os_text};

/// Longer than any file that a person has written; whatever exceeds it is something else.
pub const MAX: u64 = 1 << 20;

/// The text of the file; `None` when there is none.
///
/// # Errors
/// `Os` for a file that cannot be read, `Invalid` for what is not a file, not UTF-8 or too long; all name the path.
pub fn read(path: &Path) -> Result<Option<String>, Error> {
    match read_file(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == Kind::Os(libc::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The text of a file that has to be there.
///
/// # Errors
/// As [`read`], and for one that is not there.
pub fn read_named(path: &Path) -> Result<String, Error> {
    read(path)?.ok_or_else(|| cannot(path, &io::Error::from_raw_os_error(libc::ENOENT)))
}

fn read_file(path: &Path) -> Result<String, Error> {
    let failed = |error: io::Error| cannot(path, &error);
    let invalid = |what: &str| Error::new(Kind::Invalid, format!("{}: {what}", path.display()));
    // Checked before it is opened, because opening may have an effect (a watchdog starts), and again afterwards, because
    // the path may name another file by then.
    let regular = |kind: FileType| if kind.is_file() { Ok(()) } else { Err(invalid(&not_a_file(kind))) };
    regular(fs::metadata(path).map_err(failed)?.file_type())?;
    let file: File = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY | libc::O_CLOEXEC)
        .open(path)
        .map_err(failed)?;
    regular(file.metadata().map_err(failed)?.file_type())?;

    let mut bytes = Vec::new();
    file.take(MAX + 1).read_to_end(&mut bytes).map_err(failed)?;
    if bytes.len() as u64 > MAX {
        return Err(invalid(&format!("longer than {MAX} bytes")));
    }
    String::from_utf8(bytes).map_err(|_| invalid("must be UTF-8"))
}

/// The error for a path that cannot be read.
pub fn cannot(path: &Path, error: &io::Error) -> Error {
    let errno = error.raw_os_error().unwrap_or(libc::EIO);
    Error::new(Kind::Os(errno), format!("{}: {}", path.display(), os_text(error)))
}

fn not_a_file(kind: FileType) -> String {
    let is = if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a FIFO"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    };
    format!("must be a regular file, and is {is}")
}

/// A line that is more than blanks and a comment.
#[derive(Clone, Copy, Debug)]
pub struct Line<'a> {
    /// From 1.
    pub number: usize,
    /// What it says, without the comment and surrounding blanks.
    pub says: &'a str,
    whole: &'a str,
}

impl Line<'_> {
    /// "LINE:COLUMN" of a part of what the line says, in characters from 1. A missing (empty) part is placed behind it all.
    pub fn place(&self, part: &str) -> String {
        let bytes_before = |part: &str| part.as_ptr().addr().checked_sub(self.whole.as_ptr().addr());
        let before =
            bytes_before(part).and_then(|bytes| self.whole.get(..bytes)).filter(|_| !part.is_empty());
        let end = || bytes_before(self.says).and_then(|bytes| self.whole.get(..bytes + self.says.len()));
        let before = before.or_else(end).unwrap_or(self.whole);
        format!("{}:{}", self.number, before.chars().count() + 1)
    }
}

/// The lines that are more than blanks and a comment.
pub fn lines(text: &str) -> impl Iterator<Item = Line<'_>> {
    let lines = text.lines().enumerate().map(|(at, whole)| {
        let says = without_comment(whole).trim();
        Line { number: at + 1, says, whole }
    });
    lines.filter(|line| !line.says.is_empty())
}

/// A `#` inside a word belongs to the word: paths may contain it.
fn without_comment(line: &str) -> &str {
    let begins = |&(at, _): &(usize, &str)| line[..at].chars().next_back().is_none_or(char::is_whitespace);
    let comment = line.match_indices('#').find(begins);
    comment.map_or(line, |(at, _)| &line[..at])
}

/// The words of a list, separated by commas or blanks.
pub fn words(value: &str) -> impl Iterator<Item = &str> {
    value.split(|c: char| c == ',' || c.is_whitespace()).filter(|word| !word.is_empty())
}

/// A value in an error: visible whatever it contains, and short.
pub fn quoted(value: &str) -> String {
    format!("{:?}", shortened(value))
}

/// The beginning of a value.
pub fn shortened(value: &str) -> String {
    const MAX: usize = 64;
    match value.char_indices().nth(MAX) {
        None => value.to_owned(),
        Some((at, _)) => format!("{}...", &value[..at]),
    }
}

/// Digits and nothing else: `parse` alone would let a sign pass.
pub fn digits(value: &str) -> Option<u64> {
    if value.bytes().all(|b| b.is_ascii_digit()) { value.parse().ok() } else { None }
}

/// A number of bytes, with K, M or G for powers of 1024.
pub fn size(value: &str, low: usize, high: usize) -> Option<usize> {
    let (value, unit) = match value.as_bytes().last()? {
        b'K' | b'k' => (&value[..value.len() - 1], 1 << 10),
        b'M' | b'm' => (&value[..value.len() - 1], 1 << 20),
        b'G' | b'g' => (&value[..value.len() - 1], 1 << 30),
        _ => (value, 1),
    };
    let bytes = usize::try_from(digits(value)?.checked_mul(unit)?).ok()?;
    (low..=high).contains(&bytes).then_some(bytes)
}

/// The number of a program, version or procedure: decimal, or hexadecimal with 0x.
pub fn program_number(word: &str) -> Option<u32> {
    match word.strip_prefix("0x") {
        Some(hex) if hex.bytes().all(|b| b.is_ascii_hexdigit()) => u32::from_str_radix(hex, 16).ok(),
        Some(_) => None,
        None => digits(word).and_then(|n| u32::try_from(n).ok()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    #[track_caller]
    fn refused(path: &Path) -> String {
        read(path).unwrap_err().text().to_owned()
    }

    #[test]
    fn a_missing_file_is_none_and_what_is_no_file_is_an_error_that_says_what_it_is() {
        assert_eq!(read(Path::new("/does/not/exist")).unwrap(), None);
        assert_eq!(refused(Path::new("/")), "/: must be a regular file, and is a directory");
        assert_eq!(refused(Path::new("/dev/zero")), "/dev/zero: must be a regular file, and is a device");
        assert_eq!(refused(Path::new("/proc/self/exe")), "/proc/self/exe: longer than 1048576 bytes");
        assert_eq!(refused(Path::new("/dev/null/x")), "/dev/null/x: Not a directory");
    }

    #[test]
    fn a_fifo_or_a_socket_without_another_end_holds_up_nobody() {
        let folder = std::env::temp_dir().join(format!("rpcrdma-textfile-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        let (fifo, socket) = (folder.join("fifo"), folder.join("socket"));
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        let _listener = UnixListener::bind(&socket).unwrap();
        let texts = (refused(&fifo), refused(&socket));
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(texts.0, format!("{}: must be a regular file, and is a FIFO", fifo.display()));
        assert_eq!(texts.1, format!("{}: must be a regular file, and is a socket", socket.display()));
    }

    #[test]
    fn a_file_of_the_longest_length_is_read_and_a_longer_one_is_not() {
        let path = std::env::temp_dir().join(format!("rpcrdma-textfile-long-{}", std::process::id()));
        fs::write(&path, vec![b'#'; MAX as usize]).unwrap();
        let whole = read(&path).unwrap().unwrap().len();
        fs::write(&path, vec![b'#'; MAX as usize + 1]).unwrap();
        let text = refused(&path);
        fs::write(&path, b"\xff").unwrap();
        let bytes = refused(&path);
        fs::remove_file(&path).unwrap();
        assert_eq!(whole as u64, MAX);
        assert!(text.ends_with(": longer than 1048576 bytes"), "{text}");
        assert!(bytes.ends_with(": must be UTF-8"), "{bytes}");
    }

    #[test]
    fn a_line_has_its_number_and_no_comment() {
        let text = "# one\r\n\r\n  two # 2\r\n\t#\r\nfour#4\t# four\n";
        let all: Vec<_> = lines(text).map(|line| (line.number, line.says)).collect();
        assert_eq!(all, [(3, "two"), (5, "four#4")]);
    }

    #[test]
    fn a_part_of_a_line_has_a_column_in_characters() {
        let line = lines("\n \u{fc}\u{df} = b, cd # e").next().unwrap();
        let (key, value) = line.says.split_once('=').unwrap();
        assert_eq!((line.place(key), line.place(value.trim())), ("2:2".into(), "2:7".into()));
        assert_eq!(line.place(&value[4..]), "2:10");
        // What is missing is placed behind it.
        assert_eq!(line.place(""), "2:12");
    }
}
