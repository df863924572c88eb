//! Bindings as text: the form that rpcrdma-bindings(5) documents, one procedure a line.
//!
//! ```text
//! PROGRAM VERSION PROCEDURE [arguments=SHAPE] [results=SHAPE] [max-reply=SIZE] [preset]
//! ```
//!
//! Every line that is not understood is reported, with the reason. What follows from that is up to `config`.
#![forbid(unsafe_code)]

use std::collections::HashMap;

use super::{Key, Origin, Procedure, Stop, Walk, padded, reserved};
use crate::textfile::{self, program_number, quoted, size};

/// The part of a line that is not understood, and why.
type Wrong<'a> = (&'a str, String);

/// The procedures of a text, and why the other lines are not understood: "NAME:LINE:COLUMN: reason".
pub(super) fn parse(name: &str, text: &str) -> (Vec<(Key, Procedure)>, Vec<String>) {
    let mut entries = Vec::new();
    let mut errors = Vec::new();
    let mut seen: HashMap<Key, usize> = HashMap::new();
    for line in textfile::lines(text) {
        let entry = procedure(line.says).and_then(|(key, procedure)| match seen.insert(key, line.number) {
            None => Ok((key, procedure)),
            Some(first) => {
                let (program, version, procedure) = key;
                let reason = format!("{program} {version} {procedure} is already given in line {first}");
                Err((line.says, reason))
            }
        });
        match entry {
            Ok(entry) => entries.push(entry),
            Err((part, reason)) => errors.push(format!("{name}:{}: {reason}", line.place(part))),
        }
    }
    (entries, errors)
}

fn procedure(line: &str) -> Result<(Key, Procedure), Wrong<'_>> {
    let mut words = line.split_whitespace();
    let mut number = |what: &str| {
        let word = words.next().ok_or_else(|| ("", format!("{}: {what} is missing", quoted(line))))?;
        let number = program_number(word).ok_or_else(|| {
            let must = "a whole number, decimal or hexadecimal with 0x";
            (word, format!("{}: must be {what}: {must}", quoted(word)))
        })?;
        Ok::<_, Wrong<'_>>((word, number))
    };
    let (word, program) = number("the number of a program")?;
    if let Some(reason) = reserved(program) {
        return Err((word, format!("{}: must be another program: {reason}", quoted(word))));
    }
    let (_, version) = number("the number of its version")?;
    let (_, procedure) = number("the number of the procedure")?;
    let mut said = Said::default();
    for word in words {
        said.option(word)?;
    }
    let said = said.procedure().map_err(|reason| (line, reason))?;
    Ok(((program, version, procedure), said))
}

/// What a line says after its numbers.
#[derive(Default)]
struct Said {
    arguments: Option<Vec<Step>>,
    results: Option<Vec<Step>>,
    max_reply: Option<usize>,
    preset: bool,
}

/// One word of a shape.
#[derive(Clone, Copy, PartialEq)]
enum Step {
    /// This many bytes, pad included.
    Fixed(usize),
    /// Counted, not eligible.
    Opaque,
    /// A word: if it is not 0, nothing follows.
    Status,
    /// A word that bounds the data of the results.
    Count,
    /// Counted, eligible: most bytes.
    Data(Option<usize>),
    /// Anything, without data.
    Rest,
}

impl Said {
    fn option<'a>(&mut self, word: &'a str) -> Result<(), Wrong<'a>> {
        let (key, value) = word.split_once('=').unwrap_or((word, ""));
        let again = match (key, word.contains('=')) {
            ("arguments", true) => self.arguments.replace(shape(value, false)?).is_some(),
            ("results", true) => self.results.replace(shape(value, true)?).is_some(),
            ("max-reply", true) => {
                let bytes = size(value, 0, SIZE_MAX).ok_or_else(|| {
                    let must = "must be a size from 0 to 1G, such as 65536, 256K or 16M";
                    (word, format!("max-reply={}: {must}", quoted(value)))
                })?;
                self.max_reply.replace(bytes).is_some()
            }
            ("preset", false) => std::mem::replace(&mut self.preset, true),
            _ => {
                let must = "must be arguments=SHAPE, results=SHAPE, max-reply=SIZE or preset";
                return Err((word, format!("{}: {must}", quoted(word))));
            }
        };
        if again { Err((word, format!("{}: must be given once", quoted(key)))) } else { Ok(()) }
    }

    /// Checks what the parts say together, and makes the walkers.
    fn procedure(self) -> Result<Procedure, String> {
        let nothing_said = self.arguments.is_none() && self.results.is_none() && self.max_reply.is_none();
        let (arguments, results) = (self.arguments.unwrap_or_default(), self.results.unwrap_or_default());
        let data: Vec<Option<usize>> = results
            .iter()
            .filter_map(|step| if let Step::Data(most) = step { Some(*most) } else { None })
            .collect();
        let counted = arguments.contains(&Step::Count);
        if nothing_said {
            return Err("says nothing: must have arguments=, results= or max-reply=".into());
        }
        if counted && data.is_empty() {
            return Err("\"count\": must be unsigned where the results have no data to bound".into());
        }
        if !counted && data.contains(&None) {
            return Err("\"data\" of results: must be data<SIZE>, or a count must be in the arguments".into());
        }
        if self.preset && data.is_empty() {
            return Err("\"preset\": must have data in the results".into());
        }
        // Without results= nothing is known about them.
        let fixed = if results.is_empty() { None } else { results.iter().map(Step::bytes).sum() };
        let max_reply = self.max_reply;
        let walk_arguments = move |walk: &mut Walk<'_>| {
            let count = walk_shape(walk, &arguments)?.map_or(usize::MAX, |count| count as usize);
            let mut announced = 0_usize;
            for most in &data {
                let most = most.unwrap_or(usize::MAX).min(count);
                walk.result(most);
                announced = announced.saturating_add(padded(most).saturating_add(4));
            }
            match (fixed, max_reply) {
                (Some(bytes), _) => walk.reply(bytes),
                (None, Some(bytes)) => walk.reply(bytes.saturating_sub(announced)),
                (None, None) => walk.unbounded(),
            }
            Ok(())
        };
        let walk_results = move |walk: &mut Walk<'_>| walk_shape(walk, &results).map(drop);
        Ok(Procedure {
            origin: Origin::Text,
            preset: self.preset,
            arguments: Box::new(walk_arguments),
            results: Box::new(walk_results),
        })
    }
}

impl Step {
    /// Most bytes in results, except for data, which is counted where it is announced. `None`: any number.
    fn bytes(&self) -> Option<usize> {
        match *self {
            Step::Fixed(bytes) => Some(bytes),
            Step::Status | Step::Count => Some(4),
            Step::Data(_) => Some(0),
            Step::Opaque | Step::Rest => None,
        }
    }
}

/// Walks over what a shape describes; returns the word that `count` stands for.
fn walk_shape(walk: &mut Walk<'_>, shape: &[Step]) -> Result<Option<u32>, Stop> {
    let mut count = None;
    for step in shape {
        match *step {
            Step::Fixed(bytes) => walk.skip(bytes)?,
            Step::Opaque => walk.opaque()?,
            Step::Status if walk.word()? != 0 => break,
            Step::Status => {}
            Step::Count => count = Some(walk.word()?),
            Step::Data(_) => walk.item()?,
            Step::Rest => break,
        }
    }
    Ok(count)
}

fn shape(text: &str, of_results: bool) -> Result<Vec<Step>, Wrong<'_>> {
    let words: Vec<&str> = text.split(',').collect();
    let mut shape = Vec::new();
    for (at, &word) in words.iter().enumerate() {
        let step = step(word, of_results).ok_or_else(|| {
            let own = if of_results { "status" } else { "count" };
            let reason = format!(
                "{}: must be int, unsigned, bool, enum, hyper, opaque, string, opaque[BYTES], {own}, data, \
                 data<SIZE> or ..., with commas between",
                quoted(word)
            );
            // An empty word between two commas is reported where the shape begins.
            (if word.is_empty() { text } else { word }, reason)
        })?;
        if step == Step::Rest && at + 1 < words.len() {
            return Err((word, "\"...\": must be the last word".into()));
        }
        if step == Step::Count && shape.contains(&step) {
            return Err((word, "\"count\": must be given once".into()));
        }
        shape.push(step);
    }
    Ok(shape)
}

fn step(word: &str, of_results: bool) -> Option<Step> {
    let sized = |open: &str, close: char| {
        word.strip_prefix(open).and_then(|rest| rest.strip_suffix(close)).and_then(|n| size(n, 1, SIZE_MAX))
    };
    match word {
        "int" | "unsigned" | "bool" | "enum" => Some(Step::Fixed(4)),
        "hyper" => Some(Step::Fixed(8)),
        "opaque" | "string" => Some(Step::Opaque),
        "status" if of_results => Some(Step::Status),
        "count" if !of_results => Some(Step::Count),
        "data" => Some(Step::Data(None)),
        "..." => Some(Step::Rest),
        _ => {
            let fixed = sized("opaque[", ']').map(|bytes| Step::Fixed(padded(bytes)));
            fixed.or_else(|| sized("data<", '>').map(|most| Step::Data(Some(most))))
        }
    }
}

/// Every message of such a size has 32-bit lengths, with room to spare.
const SIZE_MAX: usize = 1 << 30;
