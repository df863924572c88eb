//! Bindings: which items of a message may be placed directly.
//!
//! ```text
//! what | seed of the pieces | procedure (2) | where it is cut (2) | choices (8) | an RPC message
//! ```
//!
//! A Call names its procedure itself; for a reply, and for a Call of another program, the third field names one.

use std::sync::OnceLock;

use rpcrdma::binding::{Binding, Head, Item, Registry};

use crate::input::{Input, pieces};

const TEXT: &str = "\
0x20004653 1 4 arguments=string,hyper,int,data results=int
0x20004653 1 5 arguments=string,hyper,count results=status,data
0x20004653 1 6 arguments=data<100>,opaque,data results=data<4096>,string,opaque[5],data<8> max-reply=64K preset
";

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (what, seed) = (input.byte(), input.byte());
    let (procedure, cut) = (usize::from(input.half()), usize::from(input.half()));
    let choices = input.bytes(8);
    let message = input.rest();
    let Known { registry, keys } = known();
    let (program, version, number) = keys[procedure % keys.len()];
    let given = registry.find(program, version, number).expect("it was there");
    match what % 2 {
        0 => {
            let head = Head::of(&[message]);
            let own = head.and_then(|head| registry.find(head.program, head.version, head.procedure));
            call(&own.unwrap_or(given), message, seed, cut);
        }
        _ => {
            reply(&given, message, seed, cut);
            reduced(&given, message, seed, choices);
        }
    }
}

struct Known {
    registry: Registry,
    keys: Vec<(u32, u32, u32)>,
}

fn known() -> &'static Known {
    static KNOWN: OnceLock<Known> = OnceLock::new();
    KNOWN.get_or_init(|| {
        let registry = Registry::built_in();
        assert_eq!(registry.add_text("text", TEXT), Vec::<String>::new());
        let mut keys = Vec::new();
        for program in [100_003, 100_227, 0x4000_0000, 0x2000_4653] {
            for version in 0..5 {
                keys.extend((0..64).map(|number| (program, version, number)));
            }
        }
        keys.retain(|key| registry.find(key.0, key.1, key.2).is_some());
        Known { registry, keys }
    })
}

/// Checks that items are in order, apart, and where XDR puts opaque data.
fn in_order(items: &[Item], message: &[u8]) {
    for item in items {
        assert!(item.position % 4 == 0 && (4..=message.len()).contains(&item.position), "{item:?}");
        let length = u32::from_be_bytes(message[item.position - 4..item.position].try_into().expect("four"));
        assert_eq!(length as usize, item.length, "an item without its count");
    }
    assert!(items.windows(2).all(|two| two[0].range().end <= two[1].position), "{items:?}");
    // Only the last one's bytes may be missing.
    let others = items.split_last().map_or(&[][..], |(_, others)| others);
    assert!(others.iter().all(|item| item.range().end <= message.len()));
}

/// The items that begin in the first `end` bytes.
fn until(items: &[Item], end: usize) -> &[Item] {
    &items[..items.partition_point(|item| item.position <= end)]
}

fn call(binding: &Binding, message: &[u8], seed: u8, cut: usize) {
    let whole = binding.call(&[message]);
    let split = pieces(message, seed);
    assert_eq!(whole, binding.call(&split));
    assert_eq!(Head::of(&[message]), Head::of(&split));
    in_order(&whole.items, message);
    if let Some(head) = Head::of(&[message]) {
        assert!(head.arguments <= message.len() && head.arguments >= 40);
        let [program, version, procedure, _] = Head::names(message).expect("a head has names");
        assert_eq!((program, version, procedure), (head.program, head.version, head.procedure));
        assert!(whole.items.iter().all(|item| item.position > head.arguments));
        let nothing = whole.items.is_empty() && whole.results.is_empty() && whole.complete;
        assert!(!head.wrapped || nothing, "a wrapped Call is reduced");
    } else {
        assert!(!whole.complete && whole.items.is_empty());
    }
    if let Some(most) = whole.max_results {
        let data: usize = whole.results.iter().fold(0, |sum, most| sum.saturating_add(*most));
        assert!(whole.complete && data <= most, "{whole:?}");
    }
    let end = cut.min(message.len());
    let begun = binding.call(&[&message[..end]]);
    assert_eq!(begun.items, until(&whole.items, end), "of {end} bytes");
    assert!(whole.results.starts_with(&begun.results));
}

fn reply(binding: &Binding, message: &[u8], seed: u8, cut: usize) {
    let whole = binding.reply(&[message]);
    assert_eq!(whole, binding.reply(&pieces(message, seed)));
    in_order(&whole.items, message);
    let end = cut.min(message.len());
    let begun = binding.reply(&[&message[..end]]);
    assert_eq!(begun.items, until(&whole.items, end), "of {end} bytes");
}

/// The message as a reply that has been reduced, and as one that is reduced here.
fn reduced(binding: &Binding, message: &[u8], seed: u8, choices: &[u8]) {
    let chunks: Vec<Option<usize>> =
        choices.iter().map(|choice| (*choice != 255).then_some(usize::from(*choice) * 4)).collect();
    let as_it_is = binding.reduced(&[message], &chunks).ok();
    assert_eq!(as_it_is, binding.reduced(&pieces(message, seed), &chunks).ok());
    for placed in as_it_is.iter().flat_map(|reduced| &reduced.placed) {
        assert!(placed.at <= message.len() && chunks[placed.chunk] == Some(placed.length));
    }

    let whole = binding.reply(&[message]);
    // If there are more items, not all are listed.
    if !whole.complete || whole.items.len() > 1000 {
        return;
    }
    let (mut chunks, mut expected, mut short, mut at) = (Vec::new(), Vec::new(), Vec::new(), 0);
    for (index, item) in whole.items.iter().enumerate() {
        let place = item.length > 0 && choices.get(index % 8).is_some_and(|choice| choice & 1 == 1);
        chunks.push(place.then_some(item.length));
        if place {
            short.extend_from_slice(&message[at..item.position]);
            expected.push((index, short.len(), item.length));
            at = item.range().end.next_multiple_of(4);
        }
    }
    short.extend_from_slice(&message[at..]);
    let reduced = binding.reduced(&pieces(&short, seed), &chunks).expect("as it was reduced");
    let placed: Vec<_> = reduced.placed.iter().map(|p| (p.chunk, p.at, p.length)).collect();
    assert_eq!((placed, reduced.unreduced, reduced.complete), (expected, false, true));
}
