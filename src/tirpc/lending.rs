//! Which items of a message stay in the program's memory until they are sent: for calls and for replies alike.
#![forbid(unsafe_code)]

use crate::binding::{Binding, Item};
use crate::config::Config;
use crate::memory::registered;
use crate::xdr::Lending;

/// The eligible items of the part of a message that is encoded so far: [`Binding::call`] or [`Binding::reply`].
pub type Items = fn(&Binding, &[&[u8]]) -> Vec<Item>;

/// Lends items of at least `at_least` bytes: those that a binding names, those in registered memory, or all
/// (`RPCRDMA_BY_REFERENCE`). `None` when nothing could be lent.
///
/// Everything else is copied while it is encoded: existing programs encode from temporaries that they free before the
/// message is sent.
pub fn lending(config: &Config, binding: Option<&Binding>, at_least: usize, items: Items) -> Option<Lending> {
    let all = config.by_reference;
    if !all && binding.is_none() && !registered::any() {
        return None;
    }
    let named = binding.map(|binding| named(binding, items));
    let which = move |so_far: &[u8], from: *const u8, n: usize| {
        all || registered::cover(from.addr(), n) || named.as_ref().is_some_and(|named| named(so_far, n))
    };
    Some(Lending { at_least, which: Box::new(which), stop: false })
}

/// Stops an encoder at the first item that a binding names: the caller only asks where it lies.
pub fn probe(binding: &Binding, at_least: usize, items: Items) -> Lending {
    let named = named(binding, items);
    Lending { at_least, which: Box::new(move |so_far, _, n| named(so_far, n)), stop: true }
}

/// Whether an opaque of `n` bytes would be eligible after what is encoded so far.
fn named(binding: &Binding, items: Items) -> impl Fn(&[u8], usize) -> bool + Send + use<> {
    let binding = binding.clone();
    move |so_far, n| items(&binding, &[so_far]).last() == Some(&Item { position: so_far.len(), length: n })
}
