//! `rpcrdma check`: what is wrong with settings and bindings, in the words of the library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use rpcrdma::binding::Registry;
use rpcrdma::config;

#[derive(clap::Args)]
#[command(after_help = "Prints FILE:LINE:COLUMN: what is wrong, and what is allowed.\n\
                        Exit status: 0 all is understood, 1 something is not, or a file cannot be read.")]
pub struct Args {
    /// Files in the form of rpcrdma.conf(5) or rpcrdma-bindings(5), which is told by what they hold. Without one: the files and
    /// the environment that programs which are started from here would get.
    files: Vec<PathBuf>,
}

pub fn run(args: &Args) -> ExitCode {
    let mut wrong = Vec::new();
    if args.files.is_empty() {
        for error in config::check() {
            wrong.push(located(error.text(), |path| fs::read_to_string(path).ok()));
        }
    }
    for path in &args.files {
        match fs::read_to_string(path) {
            Ok(text) => wrong.extend(check(path, &text)),
            Err(error) => wrong.push(format!("{}: {error}", path.display())),
        }
    }
    for line in &wrong {
        println!("{line}");
    }
    if wrong.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// What is wrong in a file.
fn check(path: &Path, text: &str) -> Vec<String> {
    let errors: Vec<String> = if holds_bindings(text) {
        Registry::built_in().add_text(&path.display().to_string(), text)
    } else {
        config::check_text(path, text).iter().map(|error| error.text().to_owned()).collect()
    };
    errors.iter().map(|error| located(error, |_| Some(text.to_owned()))).collect()
}

/// A line of bindings begins with a program's number, one of settings is `key = value`.
fn holds_bindings(text: &str) -> bool {
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    lines.filter(|line| !line.is_empty()).any(|line| {
        let first = line.split([' ', '\t', '=']).next().unwrap_or_default();
        first.starts_with(|c: char| c.is_ascii_digit())
    })
}

/// "FILE:LINE: what" with a column behind the line, where what is wrong is found in that line: at the first thing that the
/// text quotes, or at its first letter.
fn located(error: &str, text_of: impl Fn(&str) -> Option<String>) -> String {
    let column = || {
        let (place, what) = error.split_once(": ")?;
        let (path, line) = place.rsplit_once(':')?;
        let line: usize = line.parse().ok()?;
        let text = text_of(path)?;
        let line = text.lines().nth(line.checked_sub(1)?)?;
        let start = line.find(|c: char| !c.is_whitespace())?;
        // What stands in front of the quoted words names the key, behind which they are then.
        let key = what.split_once(" = \"").and_then(|(key, _)| line.find(key).map(|at| at + key.len()));
        let quoted = what.split('"').nth(1).filter(|quoted| !quoted.is_empty());
        let from = key.unwrap_or(start);
        let at = quoted.and_then(|quoted| line[from..].find(quoted)).map_or(start, |at| from + at);
        Some(format!("{place}:{}: {what}", line[..at].chars().count() + 1))
    };
    column().unwrap_or_else(|| error.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_has_its_line_and_its_column() {
        let path = Path::new("f");
        assert_eq!(check(path, "# fine\ncredits = 64\n"), [""; 0]);
        let wrong = check(path, "credits = 64\n  poll =  never\ncredit = 1\nnothing\n");
        assert!(wrong[0].starts_with("f:2:11: poll = \"never\": must be a whole number"), "{}", wrong[0]);
        assert!(wrong[1].starts_with("f:3:1: \"credit\": no such setting; did you mean credits?"), "{}", wrong[1]);
        assert!(wrong[2].starts_with("f:4:1: \"nothing\": must be `key = value`"), "{}", wrong[2]);
        assert_eq!(wrong.len(), 3);
    }

    #[test]
    fn bindings_are_told_from_settings() {
        let path = Path::new("b");
        assert_eq!(check(path, "# x\n0x20004653 1 4 arguments=string,data results=int\n"), [""; 0]);
        let wrong = check(path, "9 1 4 arguments=strong,data\n");
        assert!(wrong.len() == 1 && wrong[0].starts_with("b:1:17: "), "{wrong:?}");
    }
}
