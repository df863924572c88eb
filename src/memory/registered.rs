//! Memory that the program has registered (`rpcrdma_mem_register`): what lies in it is sent from there.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::fork::Lock;

/// First address and length of each range; they do not overlap.
static RANGES: Lock<BTreeMap<usize, usize>> = Lock::new();

/// Whether there was ever one: saves the lock.
static ANY: AtomicBool = AtomicBool::new(false);

/// Whether any memory was ever registered.
pub fn any() -> bool {
    ANY.load(Relaxed)
}

/// Registers `len` bytes at `address`. Returns false when there are none, or they wrap, or overlap a registered range.
pub fn add(address: usize, len: usize) -> bool {
    let Some(end) = address.checked_add(len).filter(|_| address != 0 && len != 0) else { return false };
    let mut ranges = RANGES.lock();
    let before = ranges.range(..end).next_back();
    if before.is_some_and(|(start, len)| start + len > address) {
        return false;
    }
    ranges.insert(address, len);
    ANY.store(true, Relaxed);
    true
}

/// Ends the registration that begins at `address`. Returns false when there is none.
pub fn remove(address: usize) -> bool {
    RANGES.lock().remove(&address).is_some()
}

/// Whether all of the range is registered.
pub fn cover(address: usize, len: usize) -> bool {
    if !any() {
        return false;
    }
    let inside = |ranges: &BTreeMap<usize, usize>| {
        let (start, covered) = ranges.range(..=address).next_back().map(|(start, len)| (*start, *len))?;
        Some(address - start <= covered && len <= covered - (address - start))
    };
    inside(&RANGES.lock()).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_covered_by_the_registration_that_it_lies_in_as_a_whole() {
        // Addresses of this test alone: the table is that of the process.
        const AT: usize = 0x7000_0000_0000;
        assert!(add(AT, 100) && add(AT + 100, 50) && add(AT - 10, 10));
        assert!(!add(AT + 99, 1) && !add(AT - 5, 200) && !add(AT, 0) && !add(usize::MAX, 2) && !add(0, 9));
        assert!(cover(AT, 100) && cover(AT + 99, 1) && cover(AT + 100, 50));
        assert!(!cover(AT + 99, 2) && !cover(AT + 150, 1) && !cover(AT - 11, 1) && !cover(AT, usize::MAX));
        assert!(remove(AT) && !remove(AT) && !cover(AT, 1) && cover(AT + 100, 1));
        assert!(remove(AT + 100) && remove(AT - 10));
    }
}
