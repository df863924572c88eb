//! Text that people write: settings in a file and in the environment, and bindings.
//!
//! The first byte says which; the rest is the text.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;

use rpcrdma::binding::Registry;
use rpcrdma::fuzz::settings;

use crate::input::pieces;

pub fn run(data: &[u8]) {
    let Some((&which, bytes)) = data.split_first() else { return };
    match (which % 3, std::str::from_utf8(bytes)) {
        (0, Ok(text)) => bindings(text, which / 3),
        (1, Ok(text)) => file(text),
        (2, _) => environment(bytes),
        _ => {}
    }
}

/// The text without its last line.
fn without_end(text: &str) -> &str {
    let text = text.strip_suffix('\n').unwrap_or(text);
    text.rfind('\n').map_or("", |end| &text[..=end])
}

/// Checks that an error is fit for a terminal: one line, not too long to read.
fn visible(error: &str) {
    assert!(error.len() < 2000, "an error of {} bytes", error.len());
    assert!(!error.chars().any(char::is_control), "{error:?}");
}

fn bindings(text: &str, seed: u8) {
    let (all, start) = (Registry::built_in(), Registry::built_in());
    let errors = all.add_text("text", text);
    errors.iter().for_each(|error| visible(error));
    assert!(errors.len() <= text.lines().count());
    // A line has no effect on those before it.
    let first = start.add_text("text", without_end(text));
    assert!(errors.starts_with(&first), "{errors:?} behind {first:?}");

    // The procedures that are in the dictionary.
    for key in [(1, 1, 1), (0x2000_4653, 1, 4), (2, 1, 1)] {
        let Some(binding) = all.find(key.0, key.1, key.2) else { continue };
        assert!(all.knows(key.0, key.1));
        let mut call = words(&[7, 0, 2, key.0, key.1, key.2, 0, 0, 0, 0]);
        call.extend_from_slice(&words(&[3, 0, 1, 2, 8, 1, 1, 1, 1, 1, 1, 1, 1, 1]));
        assert_eq!(binding.call(&[&call]), binding.call(&pieces(&call, seed)));
        let reply = words(&[7, 1, 0, 0, 0, 0, 0, 3, 1, 8, 1, 2, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(binding.reply(&[&reply]), binding.reply(&pieces(&reply, seed)));
        let reduced = |reply: &[&[u8]]| binding.reduced(reply, &[Some(8), None, Some(0)]).ok();
        assert_eq!(reduced(&[&reply]), reduced(&pieces(&reply, seed)));
    }
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn file(text: &str) {
    let (config, errors) = settings([], Some(text), false);
    errors.iter().for_each(|error| visible(error.text()));
    assert!(errors.len() <= text.lines().count());
    let (_, first) = settings([], Some(without_end(text)), false);
    let texts =
        |errors: &[rpcrdma::fuzz::Error]| errors.iter().map(|e| e.text().to_owned()).collect::<Vec<_>>();
    assert!(texts(&errors).starts_with(&texts(&first)));
    // A file counts for a program with more rights than its user, as it does for any other.
    assert_eq!(format!("{config:?}"), format!("{:?}", settings([], Some(text), true).0));
    bounded(&config);
}

fn bounded(config: &rpcrdma::config::Config) {
    for locked in [false, true] {
        let (first, most) = config.receive_sizes(locked);
        assert!(first <= most && most <= 262_144 && first % 1024 == 0 && most % 1024 == 0);
        assert!((1024..=1 << 30).contains(&config.max_reply(locked)));
    }
    assert!((1..=4096).contains(&config.credits) && (1..=4096).contains(&config.reverse_credits));
}

fn environment(bytes: &[u8]) {
    let variable = |line: &[u8]| {
        let at = line.iter().position(|byte| *byte == b'=')?;
        let name = OsString::from_vec([b"RPCRDMA_", &line[..at]].concat());
        Some((name, OsString::from_vec(line[at + 1..].to_vec())))
    };
    let variables: Vec<_> = bytes.split(|byte| *byte == b'\n').filter_map(variable).collect();
    let (config, errors) = settings(variables.clone(), None, false);
    errors.iter().for_each(|error| visible(error.text()));
    assert!(errors.len() <= variables.len());
    bounded(&config);
    // The environment of a program with more rights than its user does not count.
    let (untouched, errors) = settings(variables, None, true);
    assert!(errors.is_empty());
    assert_eq!(format!("{untouched:?}"), format!("{:?}", settings([], None, false).0));
}
