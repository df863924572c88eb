//! Bindings in text files: rpcrdma-bindings(5) is the description for users.
//!
//! A line names a procedure and the shapes of its arguments and results, word by word as the .x file has them. Such a
//! shape is fixed but for the lengths of opaques; what needs more (unions in the middle, arrays) is written in C.
#![forbid(unsafe_code)]

use std::collections::HashSet;

use super::{Walk, Walked, Walker};

/// Rpcbind: never over RDMA.
const RPCBIND: u32 = 100_000;

/// Largest size in a file, bytes.
const SIZE_MAX: usize = 1 << 30;

/// A procedure of a text.
pub struct Entry {
    /// NAME:LINE.
    pub place: String,
    /// Program, version, procedure.
    pub key: (u32, u32, u32),
    pub preset: bool,
    pub arguments: Walker,
    pub results: Walker,
}

/// One word of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Word {
    Int,
    Hyper,
    Opaque,
    Fixed(usize),
    /// A word that must be 0, or nothing follows.
    Status,
    /// An unsigned word that bounds the data of the results.
    Count,
    /// An eligible opaque of at most so many bytes.
    Data(Option<usize>),
    /// Something follows that has nothing eligible.
    Rest,
}

const WORDS: &str = "int, hyper, opaque, string, opaque[N], status, count, data, data<SIZE>, void or ...";

/// The procedures of a text, and what is wrong with the lines that have none.
pub fn parse(name: &str, text: &str) -> (Vec<Entry>, Vec<String>) {
    let (mut entries, mut errors): (Vec<Entry>, Vec<String>) = (Vec::new(), Vec::new());
    let mut seen = HashSet::new();
    for (at, line) in text.lines().enumerate() {
        let place = format!("{name}:{}", at + 1);
        match entry(&place, line) {
            Ok(None) => {}
            Ok(Some(entry)) if seen.insert(entry.key) => entries.push(entry),
            Ok(Some(_)) => errors.push(format!("{place}: this procedure is in the file already")),
            Err(reason) => errors.push(format!("{place}: {reason}")),
        }
    }
    (entries, errors)
}

fn entry(place: &str, line: &str) -> Result<Option<Entry>, String> {
    // A comment begins at the start of a line or behind a blank.
    let mut words = line.split_whitespace().take_while(|word| !word.starts_with('#'));
    let Some(program) = words.next() else { return Ok(None) };
    let program = number(program, "a program number")?;
    let version = number(words.next().unwrap_or_default(), "a version number")?;
    let procedure = number(words.next().unwrap_or_default(), "a procedure number")?;
    if program == 0 || program == RPCBIND {
        return Err(format!("{program}: no program that can have a binding"));
    }
    let (mut arguments, mut results, mut most, mut preset) = (None, None, None, false);
    for word in words {
        let twice = |given: bool| if given { Err(format!("{word:?}: given twice")) } else { Ok(()) };
        match word.split_once('=') {
            Some(("arguments", value)) => {
                twice(arguments.is_some())?;
                arguments = Some(shape(value)?);
            }
            Some(("results", value)) => {
                twice(results.is_some())?;
                results = Some(shape(value)?);
            }
            Some(("max-reply", value)) => {
                twice(most.is_some())?;
                most = Some(
                    size(value).ok_or_else(|| format!("max-reply={value}: must be a size from 1 to 1G"))?,
                );
            }
            None if word == "preset" => preset = true,
            _ => return Err(format!("{word:?}: must be arguments=, results=, max-reply= or preset")),
        }
    }
    let arguments = arguments.unwrap_or_else(|| vec![Word::Rest]);
    let results = results.unwrap_or_else(|| vec![Word::Rest]);
    let counts = arguments.iter().filter(|word| **word == Word::Count).count();
    if counts > 1 {
        return Err("arguments: count must not be given twice".into());
    }
    for (word, of) in [(Word::Count, &results), (Word::Status, &arguments)] {
        if of.contains(&word) {
            let (word, of) = if word == Word::Count { ("count", "results") } else { ("status", "arguments") };
            return Err(format!("{of}: {word} has no meaning there"));
        }
    }
    if counts == 0 && results.contains(&Word::Data(None)) {
        return Err("results: data must have a maximum: data<SIZE>, or a count in the arguments".into());
    }
    let key = (program, version, procedure);
    let (arguments, results) = walkers(arguments, results, most);
    Ok(Some(Entry { place: place.to_owned(), key, preset, arguments, results }))
}

fn shape(value: &str) -> Result<Vec<Word>, String> {
    let mut shape = Vec::new();
    for word in value.split(',').filter(|_| value != "void") {
        if shape.last() == Some(&Word::Rest) {
            return Err(format!("{word:?}: nothing may stand behind ..."));
        }
        let inside = |open: &str, close: &str| word.strip_prefix(open)?.strip_suffix(close);
        shape.push(match word {
            "int" | "unsigned" | "bool" | "enum" => Word::Int,
            "hyper" => Word::Hyper,
            "opaque" | "string" => Word::Opaque,
            "status" => Word::Status,
            "count" => Word::Count,
            "data" => Word::Data(None),
            "..." => Word::Rest,
            _ => {
                let fixed = inside("opaque[", "]").and_then(size).map(Word::Fixed);
                let data = inside("data<", ">").and_then(size).map(|most| Word::Data(Some(most)));
                fixed.or(data).ok_or_else(|| format!("{word:?}: must be {WORDS}"))?
            }
        });
    }
    Ok(shape)
}

fn walkers(arguments: Vec<Word>, results: Vec<Word>, most: Option<usize>) -> (Walker, Walker) {
    // Bytes of the results beside their data, if the shape bounds them.
    let mut beside = Some(0usize);
    let mut data = Vec::new();
    for word in &results {
        match word {
            Word::Int | Word::Status | Word::Count => beside = beside.map(|bytes| bytes + 4),
            Word::Hyper => beside = beside.map(|bytes| bytes + 8),
            Word::Fixed(bytes) => beside = beside.map(|sum| sum.saturating_add(bytes.next_multiple_of(4))),
            Word::Data(cap) => data.push(*cap),
            Word::Opaque | Word::Rest => beside = None,
        }
    }
    let beside = beside.or(most);
    let in_arguments = move |walk: &mut Walk<'_>| -> Walked {
        let count = steps(walk, &arguments)?;
        for cap in &data {
            let most = count.into_iter().chain(*cap).min().unwrap_or(0);
            walk.result(most);
        }
        match beside {
            Some(bytes) => walk.reply(bytes),
            None => walk.unbounded(),
        }
        Ok(())
    };
    (Box::new(in_arguments), Box::new(move |walk| steps(walk, &results).map(|_| ())))
}

/// Walks a shape; returns its `count`.
fn steps(walk: &mut Walk<'_>, shape: &[Word]) -> Result<Option<usize>, super::Stop> {
    let mut count = None;
    for word in shape {
        match word {
            Word::Int => {
                walk.word()?;
            }
            Word::Hyper => {
                walk.hyper()?;
            }
            Word::Opaque => walk.opaque()?,
            Word::Fixed(bytes) => walk.skip(*bytes)?,
            Word::Count => count = Some(walk.word()? as usize),
            Word::Data(_) => walk.item()?,
            Word::Status if walk.word()? == 0 => {}
            Word::Status | Word::Rest => break,
        }
    }
    Ok(count)
}

fn number(word: &str, what: &str) -> Result<u32, String> {
    let parsed = match word.strip_prefix("0x") {
        Some(hex) if hex.bytes().all(|b| b.is_ascii_hexdigit()) => u32::from_str_radix(hex, 16).ok(),
        Some(_) => None,
        None if word.bytes().all(|b| b.is_ascii_digit()) => word.parse().ok(),
        None => None,
    };
    parsed.ok_or_else(|| format!("{word:?}: must be {what}, such as 100003 or 0x20000001"))
}

/// Bytes, with K, M or G for powers of 1024.
fn size(value: &str) -> Option<usize> {
    let (digits, unit) = match value.strip_suffix(['K', 'M', 'G']) {
        Some(digits) if value.ends_with('K') => (digits, 1 << 10),
        Some(digits) if value.ends_with('M') => (digits, 1 << 20),
        Some(digits) => (digits, 1 << 30),
        None => (value, 1),
    };
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let bytes = digits.parse::<usize>().ok()?.checked_mul(unit)?;
    (1..=SIZE_MAX).contains(&bytes).then_some(bytes)
}
