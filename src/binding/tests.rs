//! Bindings against messages that are encoded here, word by word, from the RFCs' XDR.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

use super::*;
use crate::fork;

/// An XDR encoder that remembers where its eligible items are.
#[derive(Clone, Default)]
struct Xdr {
    bytes: Vec<u8>,
    items: Vec<Item>,
}

impl Xdr {
    fn word(mut self, word: u32) -> Xdr {
        self.bytes.extend(word.to_be_bytes());
        self
    }

    fn words(self, words: &[u32]) -> Xdr {
        words.iter().fold(self, |xdr, &word| xdr.word(word))
    }

    fn fixed(mut self, length: usize) -> Xdr {
        // No zeros: pads and data must not look like counts that happen to fit.
        self.bytes.extend(std::iter::repeat_n(0xee, padded(length)));
        self
    }

    fn opaque(self, length: usize) -> Xdr {
        self.word(length as u32).fixed(length)
    }

    fn item(mut self, length: usize) -> Xdr {
        self.items.push(Item { position: self.bytes.len() + 4, length });
        self.opaque(length)
    }

    fn then(mut self, other: &Xdr) -> Xdr {
        let start = self.bytes.len();
        self.items.extend(other.items.iter().map(|i| Item { position: i.position + start, ..*i }));
        self.bytes.extend(&other.bytes);
        self
    }
}

fn xdr() -> Xdr {
    Xdr::default()
}

/// The head of a Call with AUTH_SYS.
fn call(program: u32, version: u32, procedure: u32) -> Xdr {
    xdr().words(&[0x51, 0, 2, program, version, procedure, 1]).opaque(21).words(&[0, 0])
}

/// The head of a Call with RPCSEC_GSS.
fn gss_call(procedure: u32, service: u32) -> Xdr {
    xdr().words(&[0x51, 0, 2, 100_003, 3, 7, 6, 24, 1, procedure, 9, service]).opaque(4).word(6).opaque(399)
}

fn reply() -> Xdr {
    xdr().words(&[0x51, 1, 0, 0]).opaque(5).word(0)
}

fn find(program: u32, version: u32, procedure: u32) -> Binding {
    Registry::built_in().find(program, version, procedure).expect("a binding")
}

/// COMPOUND arguments with a tag of 3 bytes.
fn compound(operations: &[(u32, Xdr)]) -> Xdr {
    let head = call(100_003, 4, 1).opaque(3).words(&[2, operations.len() as u32]);
    operations.iter().fold(head, |xdr, (number, arguments)| xdr.word(*number).then(arguments))
}

/// COMPOUND results, all NFS4_OK.
fn compound_results(operations: &[(u32, Xdr)]) -> Xdr {
    let head = reply().word(0).opaque(3).word(operations.len() as u32);
    operations.iter().fold(head, |xdr, (number, results)| xdr.words(&[*number, 0]).then(results))
}

fn write4(length: usize) -> (u32, Xdr) {
    (38, xdr().fixed(16 + 8 + 4).item(length))
}

fn read4(length: usize) -> (u32, Xdr) {
    (25, xdr().word(1).item(length))
}

fn post_op_attr() -> Xdr {
    xdr().word(1).fixed(84)
}

/// Every row of RFC 8267 §4 and §6.1 for arguments, each with other things around it.
fn eligible_arguments(length: usize) -> Vec<(Binding, Xdr)> {
    let sattr3 = xdr().words(&[1, 0o777, 0, 1, 5, 1]).fixed(8).word(2).fixed(8).word(1);
    let link = xdr().word(5).item(length).opaque(7).words(&[2, 1, 2]).opaque(8);
    let socket = xdr().word(6).opaque(7).words(&[2, 1, 2]).opaque(8);
    let device = xdr().word(4).fixed(8).opaque(7).words(&[2, 1, 2]).opaque(8);
    let operations = [
        (22, xdr().opaque(9)),
        (6, socket),
        (6, link),
        (6, device),
        write4(length),
        (9, xdr().words(&[1, 1])),
    ];
    vec![
        (find(100_003, 2, 8), call(100_003, 2, 8).fixed(32 + 12).item(length)),
        (find(100_003, 2, 13), call(100_003, 2, 13).fixed(32).opaque(3).item(length).fixed(32)),
        (find(100_003, 3, 7), call(100_003, 3, 7).opaque(33).fixed(16).item(length)),
        (find(100_003, 3, 10), call(100_003, 3, 10).opaque(33).opaque(2).then(&sattr3).item(length)),
        (find(100_003, 4, 1), compound(&operations)),
    ]
}

/// Every row of RFC 8267 §4 and §6.1 for results.
fn eligible_results(length: usize) -> Vec<(Binding, Xdr)> {
    let readlink4 = (27, xdr().item(length));
    let operations = [(22, xdr()), read4(length), readlink4, (9, xdr().words(&[1, 2]).opaque(8)), read4(1)];
    vec![
        (find(100_003, 2, 6), reply().word(0).fixed(68).item(length)),
        (find(100_003, 2, 5), reply().word(0).item(length)),
        (find(100_003, 3, 6), reply().word(0).then(&post_op_attr()).words(&[5, 1]).item(length)),
        (find(100_003, 3, 6), reply().words(&[0, 0, 5, 1]).item(length)),
        (find(100_003, 3, 5), reply().word(0).then(&post_op_attr()).item(length)),
        (find(100_003, 4, 1), compound_results(&operations)),
    ]
}

const LENGTHS: [usize; 9] = [0, 1, 2, 3, 4, 5, 1023, 4096, 65_537];

#[test]
fn every_eligible_argument_of_nfs_is_found_at_its_position() {
    // rule 110; rule 46 and rule 47: in an arm of a union (CREATE) only where the arm has one; rule 116:
    // the forms that COMPOUND makes possible.
    for length in LENGTHS {
        for (binding, call) in eligible_arguments(length) {
            let shape = binding.call(&[&call.bytes]);
            assert_eq!((shape.items, shape.complete), (call.items, true));
        }
    }
}

#[test]
fn every_eligible_result_of_nfs_is_found_at_its_position() {
    for length in LENGTHS {
        for (binding, reply) in eligible_results(length) {
            let shape = binding.reply(&[&reply.bytes]);
            assert_eq!(shape, ReplyShape { items: reply.items, complete: true });
        }
    }
}

#[test]
fn an_item_is_the_elements_of_one_opaque_without_its_count() {
    // rule 43, rule 44: the length word is before the position, the next item after it.
    let (one, two) = (find(100_003, 2, 13), find(100_003, 3, 7));
    let link = call(100_003, 2, 13).fixed(32).opaque(3).item(5);
    let shape = one.call(&[&link.bytes]);
    let [item] = shape.items[..] else { panic!("{shape:?}") };
    assert_eq!(link.bytes[item.position - 4..item.position], 5_u32.to_be_bytes());
    // Also where the message ends there.
    let write = call(100_003, 3, 7).opaque(33).fixed(16).word(77);
    let shape = two.call(&[&write.bytes]);
    assert_eq!(shape.items, [Item { position: write.bytes.len(), length: 77 }]);
    assert!(!shape.complete);
}

#[test]
fn what_the_rfc_does_not_name_is_not_eligible() {
    // rule 39, rule 111.
    let registry = Registry::built_in();
    let named = [(2, 5), (2, 6), (2, 8), (2, 13), (3, 5), (3, 6), (3, 7), (3, 10), (4, 1)];
    let mut seen = 0;
    for (program, version, procedures) in [
        (100_003, 2, 18),
        (100_003, 3, 22),
        (100_003, 4, 2),
        (100_227, 1, 6),
        (100_227, 2, 6),
        (100_227, 3, 4),
    ]
    .into_iter()
    .chain([(0x4000_0000, 1, 2)])
    {
        assert!(registry.find(program, version, procedures).is_none());
        for procedure in 0..procedures {
            let binding = registry.find(program, version, procedure).expect("a binding");
            assert_eq!((binding.origin(), binding.preset()), (Origin::BuiltIn, true));
            if program == 100_003 && named.contains(&(version, procedure)) {
                continue;
            }
            let call = call(program, version, procedure).fixed(32).opaque(40).opaque(40).fixed(64);
            let shape = binding.call(&[&call.bytes]);
            assert_eq!((shape.items, shape.results), (vec![], vec![]), "{program} {version} {procedure}");
            let reply = reply().word(0).opaque(4000).opaque(4000);
            assert_eq!(binding.reply(&[&reply.bytes]), ReplyShape { items: vec![], complete: true });
            seen += 1;
        }
    }
    assert_eq!(seen, 18 + 22 + 2 + 6 + 6 + 4 + 2 - named.len());
    assert!(registry.find(100_003, 5, 0).is_none() && registry.find(100_005, 3, 1).is_none());
}

/// Operations of version 4: number, arguments, results, and whether the arguments bound the results.
fn operations4() -> Vec<(u32, Xdr, Xdr, bool)> {
    let x = xdr;
    let attributes = || xdr().words(&[2, 1, 1]).opaque(13);
    let bitmap = || xdr().words(&[3, 1, 1, 1]);
    let owner = || xdr().fixed(8).opaque(21);
    let netaddr = || xdr().opaque(3).opaque(15);
    let netlocs = || xdr().words(&[3, 1]).opaque(5).word(2).opaque(6).word(3).then(&netaddr());
    let security =
        xdr().words(&[3, 0, 1, 99]).opaque(5).words(&[0, 0, 2, 7, 8]).words(&[6, 1]).opaque(3).opaque(0);
    let channels = || xdr().fixed(24).words(&[1, 77]).fixed(24).word(0);
    let implementation = || xdr().word(1).opaque(3).opaque(9).fixed(12);
    let ace = || xdr().fixed(12).opaque(9);
    let open = || xdr().fixed(12).then(&owner());
    let opened = || xdr().fixed(16 + 20 + 4).then(&bitmap());
    let denied = xdr().fixed(16);
    let response = || xdr().word(1).fixed(16 + 12 + 8);
    vec![
        (3, x().fixed(4), x().fixed(8), true),
        (4, x().fixed(20), x().fixed(16), true),
        (5, x().fixed(12), x().fixed(8), true),
        (6, x().word(2).opaque(3).then(&attributes()), x().fixed(20).then(&bitmap()), true),
        (7, x().fixed(8), x(), true),
        (8, x().fixed(16), x(), true),
        (9, bitmap(), attributes(), false),
        (10, x(), x().opaque(128), true),
        (11, x().opaque(6), x().fixed(20), true),
        (12, x().fixed(24).words(&[1]).fixed(24).then(&owner()), denied.clone(), true),
        (12, x().fixed(24).words(&[0]).fixed(20), denied, true),
        (13, x().fixed(20).then(&owner()), x(), true),
        (14, x().fixed(40), x().fixed(16), true),
        (15, x().opaque(6), x(), true),
        (16, x(), x(), true),
        (17, attributes(), x(), true),
        // No creation, by name; no delegation.
        (18, open().words(&[0, 0]).opaque(5), opened().word(0), true),
        // The ways to create.
        (
            18,
            open().words(&[1, 0]).then(&attributes()).words(&[1, 2]),
            opened().word(1).fixed(20).then(&ace()),
            true,
        ),
        (18, open().words(&[1, 2]).fixed(8).word(2).fixed(16).opaque(3), opened().words(&[3, 1, 1]), true),
        (
            18,
            open().words(&[1, 3]).fixed(8).then(&attributes()).word(3).opaque(3),
            opened().words(&[3, 7]),
            true,
        ),
        // The ways to claim.
        (18, open().words(&[0, 4]), opened().word(2).fixed(20).words(&[1, 0, 9]).then(&ace()), true),
        (
            18,
            open().words(&[0, 5]).fixed(16),
            opened().word(5).fixed(20).words(&[2, 0, 9]).then(&ace()),
            true,
        ),
        (18, open().words(&[0, 6]), opened().words(&[3, 2, 0]), true),
        (19, x().fixed(4), x(), true),
        (20, x().fixed(20), x().fixed(16), true),
        (21, x().fixed(28), x().fixed(16), true),
        (22, x().opaque(27), x(), true),
        (23, x(), x(), true),
        (24, x(), x(), true),
        (25, x().fixed(24).word(1000), x().word(1).item(1000), true),
        (
            26,
            x().fixed(20).word(300).then(&bitmap()),
            x().fixed(8).word(1).fixed(8).opaque(9).then(&attributes()).words(&[0, 1]),
            true,
        ),
        (27, x(), x().item(4096), true),
        (28, x().opaque(6), x().fixed(20), true),
        (29, x().opaque(6).opaque(7), x().fixed(40), true),
        (30, x().fixed(8), x(), true),
        (31, x(), x(), true),
        (32, x(), x(), true),
        (33, x().opaque(6), x().words(&[3, 1, 6]).opaque(9).fixed(8).word(0), false),
        (34, x().fixed(16).then(&attributes()), bitmap(), true),
        (35, x().fixed(8).opaque(30).fixed(4).then(&netaddr()).fixed(4), x().fixed(16), false),
        (36, x().fixed(16), x(), true),
        (37, attributes(), x(), true),
        (38, x().fixed(28).item(1001), x().fixed(16), true),
        (39, owner(), x(), true),
        (40, x().fixed(4).then(&security), x(), true),
        (41, x().fixed(24), x().fixed(24), true),
        (
            42,
            x().fixed(8).opaque(9).words(&[0, 0, 0]),
            x().fixed(16).words(&[0]).fixed(8).opaque(3).opaque(4).word(0),
            false,
        ),
        (
            42,
            x().fixed(8).opaque(9).words(&[0, 1]).then(&bitmap()).then(&bitmap()).then(&implementation()),
            x().fixed(16)
                .word(1)
                .then(&bitmap())
                .then(&bitmap())
                .fixed(8)
                .opaque(3)
                .opaque(4)
                .then(&implementation()),
            false,
        ),
        (
            42,
            x().fixed(8)
                .opaque(9)
                .words(&[0, 2, 0, 0, 1])
                .opaque(5)
                .word(2)
                .opaque(6)
                .opaque(7)
                .fixed(8)
                .then(&implementation()),
            x().fixed(16).words(&[2, 0, 0]).fixed(16).word(1).opaque(5).fixed(8).opaque(3).opaque(4).word(0),
            false,
        ),
        (43, x().fixed(16).then(&channels()).fixed(4).then(&security), x().fixed(24).then(&channels()), true),
        (44, x().fixed(16), x(), true),
        (45, x().fixed(16), x(), true),
        (
            46,
            x().fixed(4).then(&bitmap()).fixed(24).then(&bitmap()).then(&bitmap()),
            x().word(0).fixed(24).then(&bitmap()).then(&bitmap()).then(&bitmap()),
            true,
        ),
        (46, x().fixed(4).words(&[0]).fixed(24).words(&[0, 0]), x().words(&[1, 1]), true),
        (47, x().fixed(20).word(40).words(&[1, 6]), x().fixed(4).opaque(17).words(&[1, 6]), true),
        (48, x().fixed(4).word(2).fixed(16), x().fixed(16).word(2).fixed(32).word(1), true),
        (49, x().fixed(36).word(1).fixed(8).word(1).fixed(12).fixed(4).opaque(5), x().word(1).fixed(8), true),
        (49, x().fixed(36).words(&[0, 0]).fixed(4).opaque(5), x().word(0), true),
        (50, x().fixed(52).word(40), x().fixed(20).word(1).fixed(24).opaque(11), true),
        (51, x().fixed(12).word(1).fixed(32).opaque(3), x().word(1).fixed(16), true),
        (51, x().fixed(12).word(3), x().word(0), true),
        (52, x().fixed(4), x().words(&[1, 1]), false),
        (53, x().fixed(32), x().fixed(36), true),
        (54, x().opaque(20).opaque(21), x().opaque(22), false),
        (55, x().word(2).fixed(32), x().words(&[2, 0, 0]), true),
        (56, x().fixed(4).words(&[1, 1]), x().word(4).fixed(20).then(&ace()), true),
        (56, x().fixed(4).words(&[4]), x().word(0), true),
        (57, x().fixed(8), x(), true),
        (58, x().fixed(4), x(), true),
        (59, x().fixed(32), x(), true),
        (60, x().fixed(64).then(&netlocs()), response().fixed(8), true),
        (61, x().fixed(16).word(3).then(&netaddr()), x().fixed(28).then(&netlocs()), false),
        (62, x().fixed(32), x(), true),
        (63, x().fixed(32).then(&bitmap()), bitmap(), true),
        (64, x().fixed(32).word(2).fixed(48), x(), true),
        (65, x().fixed(32 + 32 + 16 + 4).opaque(50), x(), true),
        (66, x().fixed(16), x(), true),
        (67, x().fixed(16), x().fixed(8).words(&[1, 0]), true),
        (
            68,
            x().fixed(28),
            x().words(&[1, 3, 0]).fixed(8).opaque(999).word(1).fixed(16).word(0).fixed(8).opaque(3),
            false,
        ),
        (69, x().fixed(28), x().fixed(12), true),
        (70, x().fixed(16 + 4 + 44).opaque(513), response(), true),
        (71, x().fixed(56), x(), true),
        (72, x().opaque(8), x().opaque(600), false),
        (73, x().fixed(4).opaque(8).opaque(600), x().fixed(20), true),
        (74, x().fixed(8).word(30), x().fixed(8).word(2).opaque(5).opaque(6).word(1), true),
        (75, x().opaque(8), x().fixed(20), true),
        (10044, x(), x(), true),
    ]
}

#[test]
fn every_operation_of_version_4_is_walked_over_to_the_next() {
    // rule 115: the operations of all minor versions and their extensions.
    let binding = find(100_003, 4, 1);
    let mut seen: Vec<u32> = Vec::new();
    for (number, arguments, results, bounded) in operations4() {
        // The WRITE or READ after it is found where it is, so the operation before it ends where it should.
        let call = compound(&[(number, arguments.clone()), write4(7)]);
        let shape = binding.call(&[&call.bytes]);
        assert_eq!((shape.items, shape.complete), (call.items, true), "arguments of {number}");
        let whole = compound_results(&[(number, results.clone()), read4(7)]);
        let shape = binding.reply(&[&whole.bytes]);
        assert_eq!((shape.items, shape.complete), (whole.items, true), "results of {number}");

        // rule 112: the bound holds.
        let call = compound(&[(number, arguments)]);
        let results = compound_results(&[(number, results)]);
        let most = binding.call(&[&call.bytes]).max_results;
        assert_eq!(most.is_some(), bounded, "{number}");
        assert!(
            most.is_none_or(|most| most >= results.bytes.len() - reply().bytes.len()),
            "{number}: {most:?}"
        );
        seen.push(number);
    }
    seen.dedup();
    assert_eq!(seen, (3..=75).chain([10044]).collect::<Vec<_>>());
    assert_eq!(seen, nfs4::numbers());
}

#[test]
fn an_unknown_operation_ends_the_walk() {
    let binding = find(100_003, 4, 1);
    let call = compound(&[write4(5), (76, xdr()), write4(6)]);
    let shape = binding.call(&[&call.bytes]);
    assert_eq!((&shape.items[..], shape.complete), (&call.items[..1], false));
    assert_eq!(shape.max_results, None);
    let reply = compound_results(&[read4(5), (0, xdr()), read4(6)]);
    let shape = binding.reply(&[&reply.bytes]);
    assert_eq!((&shape.items[..], shape.complete), (&reply.items[..1], false));
    // So does a choice that no RFC knows.
    let call = compound(&[(18, xdr().fixed(20).opaque(4).words(&[0, 7])), write4(6)]);
    assert_eq!(binding.call(&[&call.bytes]).items, []);
}

#[test]
fn the_results_of_version_3_have_the_sizes_of_its_xdr() {
    // rule 112. The numbers are summed up by hand from RFC 1813.
    let bounds = [
        (0, 0),
        (1, 88),
        (2, 120),
        (3, 248),
        (4, 96),
        (8, 280),
        (9, 280),
        (11, 280),
        (12, 120),
        (13, 120),
        (14, 236),
        (15, 208),
        (18, 144),
        (19, 140),
        (20, 116),
        (21, 128),
    ];
    for (procedure, most) in bounds {
        let call = call(100_003, 3, procedure).opaque(32);
        assert_eq!(find(100_003, 3, procedure).call(&[&call.bytes]).max_results, Some(most), "{procedure}");
    }
    let shape = |procedure, arguments: Xdr| {
        let shape = find(100_003, 3, procedure).call(&[&call(100_003, 3, procedure).then(&arguments).bytes]);
        (shape.results, shape.max_results)
    };
    assert_eq!(shape(5, xdr().opaque(32)), (vec![4096], Some(96 + 4096)));
    for (count, padded) in [(0, 0), (1, 4), (4097, 4100), (u32::MAX, 1 << 32)] {
        assert_eq!(
            shape(6, xdr().opaque(9).fixed(8).word(count)),
            (vec![count as usize], Some(104 + padded))
        );
    }
    assert_eq!(shape(7, xdr().opaque(32).fixed(16).item(9)), (vec![], Some(136)));
    assert_eq!(shape(10, xdr().opaque(32).opaque(1).words(&[0; 6]).item(9)), (vec![], Some(280)));
    assert_eq!(shape(16, xdr().opaque(32).fixed(16).word(8192)), (vec![], Some(108 + 8192)));
    assert_eq!(shape(17, xdr().opaque(32).fixed(16).words(&[512, 32768])), (vec![], Some(108 + 32768)));
}

#[test]
fn the_results_of_version_2_and_nfsacl_have_the_sizes_of_their_xdr() {
    let most = |program, version, procedure, arguments: Xdr| {
        let call = call(program, version, procedure).then(&arguments);
        let shape = find(program, version, procedure).call(&[&call.bytes]);
        (shape.results, shape.max_results)
    };
    for (procedure, bytes) in [(0, 0), (1, 72), (2, 72), (4, 104), (9, 104), (10, 4), (14, 104), (17, 24)] {
        assert_eq!(most(100_003, 2, procedure, xdr()), (vec![], Some(bytes)), "{procedure}");
    }
    assert_eq!(most(100_003, 2, 5, xdr()), (vec![1024], Some(4 + 4 + 1024)));
    assert_eq!(most(100_003, 2, 6, xdr().fixed(36).words(&[4097, 0])), (vec![4097], Some(72 + 4 + 4100)));
    assert_eq!(most(100_003, 2, 8, xdr().fixed(44).item(3)), (vec![], Some(72)));
    assert_eq!(most(100_003, 2, 13, xdr().fixed(32).opaque(3).item(3).fixed(32)), (vec![], Some(4)));
    assert_eq!(most(100_003, 2, 16, xdr().fixed(36).word(4096)), (vec![], Some(12 + 4096)));
    // RFC 8267 §5.2: "There is no protocol-specified size limit for NFS version 3 ACLs".
    for (version, procedure, bytes) in
        [(1, 1, None), (2, 1, None), (2, 2, Some(72)), (2, 4, Some(76)), (3, 1, None), (3, 2, Some(92))]
    {
        assert_eq!(most(100_227, version, procedure, xdr()), (vec![], bytes));
    }
    assert_eq!(most(0x4000_0000, 1, 1, xdr()), (vec![], None));
}

#[test]
fn a_compound_announces_its_results_in_order() {
    let read = |count| (25, xdr().fixed(24).word(count));
    let binding = find(100_003, 4, 1);
    let shape = binding.call(&[&compound(&[read(9), (27, xdr()), read(10)]).bytes]);
    assert_eq!(shape.results, [9, 4096, 10]);
    assert_eq!(shape.max_results, Some(12 + 4 + 3 * 8 + 4 + 4 + 12 + 4 + 4096 + 4 + 4 + 12));
    // Their number is bounded, but the bound of the results counts them all.
    let shape = binding.call(&[&compound(&vec![read(4); 100]).bytes]);
    assert_eq!((shape.results, shape.max_results), (vec![4; 64], Some(16 + 100 * 20)));
    // A bound that no machine could hold does not overflow.
    let shape = binding.call(&[&compound(&vec![read(u32::MAX); 100]).bytes]);
    assert_eq!(shape.max_results, Some(16 + 100 * (16 + (1 << 32))));
}

/// The items that a walk must find in the first `cut` bytes: those whose length word is there.
fn found_in(items: &[Item], cut: usize) -> Vec<Item> {
    items.iter().copied().filter(|item| item.position <= cut).collect()
}

#[test]
fn a_part_of_a_message_has_the_items_that_begin_in_it() {
    // An encoder asks this before the bytes of an item that it passes by reference.
    for (binding, call) in eligible_arguments(9) {
        for cut in 0..=call.bytes.len() {
            let shape = binding.call(&[&call.bytes[..cut]]);
            assert_eq!(shape.items, found_in(&call.items, cut), "{cut}");
            let whole = |item: &Item| item.position + padded(item.length) <= cut;
            assert!(!shape.complete || shape.items.iter().all(whole), "{cut}");
        }
    }
    for (binding, reply) in eligible_results(9) {
        for cut in 0..=reply.bytes.len() {
            assert_eq!(binding.reply(&[&reply.bytes[..cut]]).items, found_in(&reply.items, cut), "{cut}");
        }
        assert!(!binding.reply(&[&reply.bytes[..reply.bytes.len() - 1]]).complete);
    }
}

#[test]
fn it_does_not_matter_how_a_message_is_cut_into_pieces() {
    for (binding, call) in eligible_arguments(9) {
        let whole = binding.call(&[&call.bytes]);
        for cut in 0..=call.bytes.len() {
            let (one, two) = call.bytes.split_at(cut);
            assert_eq!(binding.call(&[one, &[], two]), whole);
        }
        let bytes: Vec<&[u8]> = call.bytes.chunks(1).collect();
        assert_eq!(binding.call(&bytes), whole);
        assert_eq!(Head::of(&bytes), Head::of(&[&call.bytes]));
    }
}

#[test]
fn a_length_that_is_not_there_ends_the_walk() {
    let huge = u32::MAX;
    let none = |binding: &Binding, call: Xdr| {
        let shape = binding.call(&[&call.bytes]);
        assert_eq!((shape.items, shape.complete, shape.max_results), (vec![], false, None));
    };
    let compound4 = |xdr: Xdr| call(100_003, 4, 1).then(&xdr);
    let v4 = find(100_003, 4, 1);
    none(&find(100_003, 3, 7), call(100_003, 3, 7).word(huge).fixed(64));
    none(&find(100_003, 3, 6), call(100_003, 3, 6).word(huge).fixed(64));
    none(&v4, compound4(xdr().word(huge).fixed(64)));
    // 2^32 - 1 operations, attributes, stateids, security parameters.
    none(&v4, compound4(xdr().words(&[0, 2, huge])));
    none(&v4, compound4(xdr().words(&[0, 2, 1, 9, huge]).fixed(64)));
    none(&v4, compound4(xdr().words(&[0, 2, 1, 55, huge]).fixed(64)));
    none(&v4, compound4(xdr().words(&[0, 2, 1, 40, 0, huge]).words(&[0; 64])));
    // An item's length is reported as it is: whoever pulls the item must compare.
    let write = call(100_003, 3, 7).opaque(8).fixed(16).word(huge);
    let shape = find(100_003, 3, 7).call(&[&write.bytes]);
    assert_eq!(shape.items, [Item { position: write.bytes.len(), length: huge as usize }]);
    assert!(!shape.complete);
    // The items that are held are bounded.
    let shape = v4.call(&[&compound(&vec![write4(0); 2000]).bytes]);
    assert_eq!((shape.items.len(), shape.complete), (1024, false));
}

#[test]
fn a_head_is_read_only_from_a_call() {
    let whole = call(100_003, 3, 7);
    let head =
        Head { program: 100_003, version: 3, procedure: 7, arguments: whole.bytes.len(), wrapped: false };
    assert_eq!(Head::of(&[&whole.bytes]), Some(head.clone()));
    assert_eq!(Head::of(&[&whole.clone().opaque(9).bytes]), Some(head));
    for cut in 0..whole.bytes.len() {
        assert_eq!(Head::of(&[&whole.bytes[..cut]]), None);
    }
    assert_eq!(Head::of(&[&reply().fixed(64).bytes]), None);
    assert_eq!(Head::names(&whole.bytes), Some([100_003, 3, 7, 1]));
    assert_eq!((Head::names(&whole.bytes[..27]), Head::names(&reply().fixed(64).bytes)), (None, None));
    let version_3 = xdr().words(&[1, 0, 3, 100_003, 3, 7, 0, 0, 0, 0]);
    assert_eq!(Head::of(&[&version_3.bytes]), None);
    for (credential, verifier, read) in [(400, 400, true), (401, 400, false), (400, 401, false)] {
        let call = xdr().words(&[1, 0, 2, 9, 9, 9, 0]).opaque(credential).word(0).opaque(verifier);
        assert_eq!(Head::of(&[&call.bytes]).is_some(), read);
    }
}

#[test]
fn nothing_is_eligible_in_a_call_that_rpcsec_gss_wraps() {
    // rule 118, rule 119.
    let binding = find(100_003, 3, 7);
    for (procedure, service, wrapped) in
        [(0, 1, false), (0, 2, true), (0, 3, true), (1, 1, true), (3, 1, true)]
    {
        let call = gss_call(procedure, service).opaque(32).fixed(16).item(77);
        assert_eq!(Head::of(&[&call.bytes]).map(|head| head.wrapped), Some(wrapped));
        let shape = binding.call(&[&call.bytes]);
        // Complete: it is known that there is nothing eligible.
        assert!(shape.complete);
        assert_eq!(shape.items, if wrapped { vec![] } else { call.items });
        assert_eq!(shape.max_results.is_none(), wrapped);
    }
    // Credentials of RPCSEC_GSS that are too short to be valid.
    for length in [0, 12] {
        let call = xdr().words(&[1, 0, 2, 100_003, 3, 7, 6]).opaque(length).words(&[0, 0]);
        assert!(Head::of(&[&call.bytes]).is_some_and(|head| head.wrapped));
    }
}

#[test]
fn a_reply_without_results_has_no_items() {
    let binding = find(100_003, 3, 6);
    let denied = xdr().words(&[1, 1, 1, 1, 5]);
    let garbage_args = xdr().words(&[1, 1, 0, 0, 0, 4]);
    let failed = reply().word(70).then(&post_op_attr());
    for reply in [denied, garbage_args, failed] {
        assert_eq!(binding.reply(&[&reply.bytes]), ReplyShape { items: vec![], complete: true });
        let reduced = binding.reduced(&[&reply.bytes], &[Some(0)]).unwrap();
        assert_eq!(reduced, Reduced { placed: vec![], unreduced: false, complete: true });
        assert_eq!(binding.reduced(&[&reply.bytes], &[Some(8)]).unwrap_err().kind(), Kind::Peer);
    }
    assert!(!binding.reply(&[&call(100_003, 3, 6).bytes]).complete);
}

/// A reply without the bytes and pads of the items that `placed` lists by index, and where these are missing then.
fn reduce(reply: &Xdr, placed: &[(usize, usize)]) -> (Vec<u8>, Vec<Placed>) {
    let mut bytes = Vec::new();
    let mut expected = Vec::new();
    let mut from = 0;
    for &(index, chunk) in placed {
        let Item { position, length } = reply.items[index];
        bytes.extend(&reply.bytes[from..position]);
        expected.push(Placed { chunk, at: bytes.len(), length });
        from = position + padded(length);
    }
    bytes.extend(&reply.bytes[from..]);
    (bytes, expected)
}

#[test]
fn results_are_matched_with_write_chunks_in_order() {
    // rule 82; rule 84: a chunk that no result takes stays unused at the end; rule 85: an empty chunk is
    // used up by the result that comes in the stream.
    let binding = find(100_003, 4, 1);
    let reply =
        compound_results(&[read4(5), (9, xdr().words(&[1, 2]).opaque(8)), read4(1021), (27, xdr().item(3))]);
    let [a, b, c] = [5, 1021, 3].map(Some);
    type Case<'a> = (&'a [Option<usize>], &'a [(usize, usize)], bool);
    let cases: &[Case] = &[
        (&[], &[], false),
        (&[a, b, c], &[(0, 0), (1, 1), (2, 2)], false),
        (&[a, b, c, Some(0), None], &[(0, 0), (1, 1), (2, 2)], false),
        // More results than chunks.
        (&[a], &[(0, 0)], false),
        (&[a, b], &[(0, 0), (1, 1)], false),
        // Empty chunks.
        (&[None, b, c], &[(1, 1), (2, 2)], false),
        (&[a, None, c], &[(0, 0), (2, 2)], false),
        (&[None, None, None], &[], false),
        // rule 61: a chunk was there, and the result is in the stream.
        (&[Some(0)], &[], true),
        (&[a, Some(0), c], &[(0, 0), (2, 2)], true),
    ];
    for (chunks, placed, unreduced) in cases {
        let (bytes, placed) = reduce(&reply, placed);
        let expected = Reduced { placed, unreduced: *unreduced, complete: true };
        assert_eq!(binding.reduced(&[&bytes], chunks).unwrap(), expected, "{chunks:?}");
        let pieces: Vec<&[u8]> = bytes.chunks(3).collect();
        assert_eq!(binding.reduced(&pieces, chunks).unwrap(), expected);
    }
}

#[test]
fn a_reply_that_reduces_something_else_is_refused() {
    // rule 61.
    let binding = find(100_003, 4, 1);
    let reply = compound_results(&[read4(5), (3, xdr().fixed(8)), read4(6)]);
    let (reduced, _) = reduce(&reply, &[(0, 0), (1, 1)]);
    let refused = |bytes: &[u8], chunks: &[Option<usize>], text: &str| {
        let error = binding.reduced(&[bytes], chunks).unwrap_err();
        assert_eq!((error.kind(), error.text()), (Kind::Peer, text));
    };
    for wrong in [4, 8] {
        let text = format!("the server placed {wrong} bytes in Write chunk 0 for a result of 5");
        refused(&reduced, &[Some(wrong), Some(6)], &text);
    }
    let none = "the server placed 7 bytes in Write chunk 2, which belongs to no eligible result";
    refused(&reduced, &[Some(5), Some(6), Some(7)], none);
    // A result that cannot be found: the reply ends before it, or the walk does not know the way to it.
    let cut = reply.items[0].position;
    refused(
        &reduced[..cut],
        &[Some(5), Some(6)],
        "the server placed 6 bytes in Write chunk 1, which belongs to no eligible result",
    );
    let unknown = compound_results(&[(76, xdr()), read4(5)]);
    refused(
        &unknown.bytes,
        &[Some(5)],
        "the server placed 5 bytes in Write chunk 0, which belongs to no eligible result",
    );
    // In a procedure that has none.
    let getattr = xdr().words(&[0x51, 1, 0, 0, 0, 0, 0]).fixed(84);
    assert!(find(100_003, 3, 1).reduced(&[&getattr.bytes], &[Some(84)]).is_err());
}

#[test]
fn a_result_of_no_bytes_uses_up_its_chunk() {
    let binding = find(100_003, 4, 1);
    let reply = compound_results(&[read4(0), read4(6)]);
    let placed = |chunk| {
        let (bytes, placed) = reduce(&reply, &[(1, chunk)]);
        (bytes, Reduced { placed, unreduced: false, complete: true })
    };
    let (bytes, reduced) = placed(1);
    assert_eq!(binding.reduced(&[&bytes], &[Some(0), Some(6)]).unwrap(), reduced);
    // A server that keeps the chunk for the next result is understood too.
    let (bytes, reduced) = placed(0);
    assert_eq!(binding.reduced(&[&bytes], &[Some(6), Some(0)]).unwrap(), reduced);
    // But not one that wrote something for it.
    let alone = compound_results(&[read4(0)]);
    assert!(binding.reduced(&[&alone.bytes], &[Some(4)]).is_err());
}

#[test]
fn a_failed_read_takes_no_chunk() {
    // rule 84: the next result takes it. In version 4 there is none: a COMPOUND ends at its first error.
    let binding = find(100_003, 4, 1);
    let failed = reply().word(5).opaque(0).words(&[2, 25, 0]).then(&read4(6).1).words(&[25, 5]);
    let (bytes, placed) = reduce(&failed, &[(0, 0)]);
    let reduced = Reduced { placed, unreduced: false, complete: true };
    assert_eq!(binding.reduced(&[&bytes], &[Some(6), Some(0)]).unwrap(), reduced);

    // A program whose results can each be missing independently.
    let registry = Registry::built_in();
    let results = |walk: &mut Walk<'_>| {
        for _ in 0..2 {
            if walk.word()? == 0 {
                walk.item()?;
            }
        }
        Ok(())
    };
    registry.add(0x2000_0001, 1, 1, Box::new(|_| Ok(())), Box::new(results)).unwrap();
    let binding = registry.find(0x2000_0001, 1, 1).unwrap();
    let (bytes, placed) = reduce(&reply().words(&[9, 0]).item(6), &[(0, 0)]);
    let reduced = Reduced { placed, unreduced: false, complete: true };
    assert_eq!(binding.reduced(&[&bytes], &[Some(6), Some(0)]).unwrap(), reduced);
}

#[test]
fn random_bytes_do_no_harm() {
    let registry = Registry::built_in();
    registry.add_text("t", "9 9 9 arguments=string,count,data,... results=status,opaque[5],data,hyper");
    let procedures =
        [(100_003, 2, 13), (100_003, 3, 7), (100_003, 3, 10), (100_003, 3, 6), (100_003, 4, 1), (9, 9, 9)];
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut found = 0;
    for round in 0..100_000 {
        let (program, version, procedure) = procedures[round % procedures.len()];
        let binding = registry.find(program, version, procedure).unwrap();
        let mut noise = xdr();
        for _ in 0..next() % 40 {
            // Small numbers are counts, operations and flags.
            let word = next();
            noise = noise.word(if word % 4 == 0 { word as u32 } else { (word >> 32) as u32 % 76 });
        }
        let cut = noise.bytes.len() - (next() % 4).min(noise.bytes.len() as u64) as usize;
        let (call, reply) = (call(program, version, procedure), reply());
        let shape = binding.call(&[&call.bytes, &noise.bytes[..cut]]);
        let end = call.bytes.len() + cut;
        assert!(shape.items.iter().all(|item| item.position <= end && item.position % 4 == 0));
        assert!(shape.items.windows(2).all(|pair| pair[0].position + pair[0].length <= pair[1].position));
        found += shape.items.len() + binding.reply(&[&reply.bytes, &noise.bytes[..cut]]).items.len();
        let chunks = [Some(next() as usize % 64), None, Some(0)];
        if let Ok(reduced) = binding.reduced(&[&reply.bytes, &noise.bytes[..cut]], &chunks) {
            assert!(reduced.placed.iter().all(|p| p.at <= reply.bytes.len() + cut));
        }
        let _ = binding.call(&[&noise.bytes]);
        let _ = Head::of(&[&noise.bytes]);
    }
    // They do reach the items.
    assert!(found > 1000, "{found}");
}

#[test]
fn a_program_adds_a_procedure_once_and_no_built_in_one() {
    let registry = Registry::built_in();
    let add = |program| registry.add(program, 1, 4, Box::new(|_| Ok(())), Box::new(|_| Ok(())));
    assert!(registry.find(0x2000_0001, 1, 4).is_none());
    add(0x2000_0001).unwrap();
    let binding = registry.find(0x2000_0001, 1, 4).unwrap();
    assert_eq!((binding.origin(), binding.preset()), (Origin::Registered, true));
    // Nothing was said about the reply.
    assert_eq!(binding.call(&[&call(0x2000_0001, 1, 4).bytes]).max_results, None);
    for program in [0x2000_0001, 0, 100_000, 100_003, 100_227, 0x4000_0000] {
        assert_eq!(add(program).unwrap_err().kind(), Kind::Invalid);
    }
    // What comes later counts, except when the program itself adds a procedure twice.
    assert_eq!(registry.add_text("f", "0x20000001 1 4 max-reply=8"), [""; 0]);
    assert_eq!(registry.find(0x2000_0001, 1, 4).unwrap().origin(), Origin::Text);
    add(0x2000_0001).unwrap();
    assert_eq!(registry.find(0x2000_0001, 1, 4).unwrap().origin(), Origin::Registered);
}

#[test]
fn a_text_describes_the_procedures_of_a_file_service() {
    let registry = Registry::built_in();
    let text = "# the service\n\n\
        0x20004653 1 4 arguments=string,hyper,int,data   # WRITE\n\
        536888915 1 5 arguments=string,hyper,count results=status,data<1M> preset\n";
    assert_eq!(registry.add_text("files.conf", text), [""; 0]);
    let write = registry.find(0x2000_4653, 1, 4).unwrap();
    assert_eq!((write.origin(), write.preset()), (Origin::Text, false));
    let call4 = call(0x2000_4653, 1, 4).opaque(9).fixed(12).item(1021);
    let shape = write.call(&[&call4.bytes]);
    assert_eq!(
        (shape.items, shape.results, shape.max_results, shape.complete),
        (call4.items, vec![], None, true)
    );

    let read = registry.find(0x2000_4653, 1, 5).unwrap();
    assert!(read.preset());
    for (count, most) in [(1000, 1000), (1001, 1001), (1 << 20, 1 << 20), (u32::MAX, 1 << 20)] {
        let call = call(0x2000_4653, 1, 5).opaque(9).fixed(8).word(count);
        let shape = read.call(&[&call.bytes]);
        assert_eq!((shape.results, shape.max_results), (vec![most], Some(8 + padded(most))));
    }
    let ok = reply().word(0).item(77);
    assert_eq!(read.reply(&[&ok.bytes]), ReplyShape { items: ok.items, complete: true });
    let failed = reply().word(2);
    assert_eq!(read.reply(&[&failed.bytes]), ReplyShape { items: vec![], complete: true });
}

#[test]
fn every_word_of_a_shape_is_walked_over() {
    let registry = Registry::built_in();
    let lines = "9 1 1 arguments=int,unsigned,bool,enum,hyper,opaque,string,opaque[5],data<9>,data,...\n\
        9 1 2 arguments=count results=hyper,data,opaque[1K],data<100>,bool max-reply=1\n\
        9 1 3 results=data<10>,opaque max-reply=1K\n\
        9 1 4 results=data<10>,... max-reply=8\n\
        9 1 5 max-reply=0\n\
        9 1 6 arguments=int";
    assert_eq!(registry.add_text("t", lines), [""; 0]);
    let shape = |procedure, arguments: &Xdr| {
        let binding = registry.find(9, 1, procedure).unwrap();
        binding.call(&[&call(9, 1, procedure).then(arguments).bytes])
    };
    let arguments = xdr().words(&[1, 2, 3, 4, 5, 6]).opaque(1).opaque(2).fixed(5).item(10).item(3);
    let found = shape(1, &arguments.clone().fixed(99));
    assert_eq!((found.items, found.complete), (call(9, 1, 1).then(&arguments).items, true));
    let bound = |procedure, arguments| {
        let found = shape(procedure, &arguments);
        (found.results, found.max_results)
    };
    // The shape bounds the results; max-reply counts where it does not.
    assert_eq!(bound(2, xdr().word(1001)), (vec![1001, 100], Some(8 + 4 + 1004 + 1024 + 4 + 100 + 4)));
    assert_eq!(bound(2, xdr()), (vec![], None));
    assert_eq!(bound(3, xdr()), (vec![10], Some(1024)));
    assert_eq!(bound(4, xdr()), (vec![10], Some(16)));
    assert_eq!(bound(5, xdr()), (vec![], Some(0)));
    assert_eq!(bound(6, xdr().word(1)), (vec![], None));
}

#[test]
fn a_line_that_is_not_understood_is_named_and_left_out() {
    const SHAPE: &str = "must be int, unsigned, bool, enum, hyper, opaque, string, opaque[BYTES], ";
    const NUMBER: &str = "a whole number, decimal or hexadecimal with 0x";
    const SIZE: &str = "must be a size from 0 to 1G, such as 65536, 256K or 16M";
    let with_shape =
        |word: &str, own: &str| format!("{word}: {SHAPE}{own}, data, data<SIZE> or ..., with commas between");
    let lines = [
        ("x 1 1 max-reply=1", format!("\"x\": must be the number of a program: {NUMBER}")),
        ("-9 1 1 max-reply=1", format!("\"-9\": must be the number of a program: {NUMBER}")),
        ("4294967296 1 1 max-reply=1", format!("\"4294967296\": must be the number of a program: {NUMBER}")),
        ("9 1.0 1 max-reply=1", format!("\"1.0\": must be the number of its version: {NUMBER}")),
        ("9 1 max-reply=1", format!("\"max-reply=1\": must be the number of the procedure: {NUMBER}")),
        ("9 1", "\"9 1\": the number of the procedure is missing".into()),
        ("0 1 1 max-reply=1", "\"0\": must be another program: there is no such program".into()),
        ("0x186A0 1 1", "\"0x186A0\": must be another program: rpcbind is not reached over rdma".into()),
        ("100003 3 7 arguments=...", "\"100003\": must be another program: its binding is built in".into()),
        ("9 1 1", "says nothing: must have arguments=, results= or max-reply=".into()),
        (
            "9 1 1 argument=int",
            "\"argument=int\": must be arguments=SHAPE, results=SHAPE, max-reply=SIZE or preset".into(),
        ),
        (
            "9 1 1 preset=1",
            "\"preset=1\": must be arguments=SHAPE, results=SHAPE, max-reply=SIZE or preset".into(),
        ),
        (
            "9 1 1 results",
            "\"results\": must be arguments=SHAPE, results=SHAPE, max-reply=SIZE or preset".into(),
        ),
        ("9 1 1 arguments=int arguments=int", "\"arguments\": must be given once".into()),
        ("9 1 1 max-reply=1 max-reply=1", "\"max-reply\": must be given once".into()),
        ("9 1 1 results=data<1> preset preset", "\"preset\": must be given once".into()),
        ("9 1 1 max-reply=2G", format!("max-reply=\"2G\": {SIZE}")),
        ("9 1 1 max-reply=", format!("max-reply=\"\": {SIZE}")),
        ("9 1 1 arguments=", with_shape("\"\"", "count")),
        ("9 1 1 arguments=int,", with_shape("\"\"", "count")),
        ("9 1 1 arguments=int, data", with_shape("\"\"", "count")),
        ("9 1 1 arguments=long", with_shape("\"long\"", "count")),
        ("9 1 1 arguments=status", with_shape("\"status\"", "count")),
        ("9 1 1 results=count", with_shape("\"count\"", "status")),
        ("9 1 1 results=opaque[0]", with_shape("\"opaque[0]\"", "status")),
        ("9 1 1 results=opaque[5", with_shape("\"opaque[5\"", "status")),
        ("9 1 1 results=data<0>", with_shape("\"data<0>\"", "status")),
        ("9 1 1 results=data<5G>", with_shape("\"data<5G>\"", "status")),
        ("9 1 1 arguments=...,int", "\"...\": must be the last word".into()),
        ("9 1 1 arguments=count,count", "\"count\": must be given once".into()),
        (
            "9 1 1 arguments=count",
            "\"count\": must be unsigned where the results have no data to bound".into(),
        ),
        (
            "9 1 1 results=data",
            "\"data\" of results: must be data<SIZE>, or a count must be in the arguments".into(),
        ),
        ("9 1 1 results=int preset", "\"preset\": must have data in the results".into()),
    ];
    for (line, reason) in lines {
        let registry = Registry::built_in();
        // The lines around it count.
        let text = format!("# a comment\n9 1 2 max-reply=1\n{line} # why\n9 1 3 max-reply=1\n");
        let [error] = registry.add_text("/etc/x.conf", &text).try_into().expect("one error");
        let (place, said) = error.split_once(": ").expect("a place");
        assert_eq!(said, reason);
        let column = place.strip_prefix("/etc/x.conf:3:").and_then(|column| column.parse::<usize>().ok());
        let column = column.expect("a column");
        // What is quoted is there; what is missing is after the line.
        let quoted = reason.split('"').nth(1).filter(|_| reason.starts_with('"')).unwrap_or("");
        let there = line.get(column - 1..).is_some_and(|rest| rest.starts_with(quoted));
        let of_all = column == 1 || (reason.contains("missing") && column == line.len() + 1);
        assert!(there || of_all, "{error}: {column} in {line}");
        let there = |procedure| registry.find(9, 1, procedure).is_some();
        assert_eq!((there(1), there(2), there(3)), (false, true, true), "{line}");
    }
}

#[test]
fn a_procedure_is_given_once_in_a_text_and_a_later_text_replaces_it() {
    let registry = Registry::built_in();
    let most = || {
        let binding = registry.find(9, 1, 1).expect("a binding");
        binding.call(&[&call(9, 1, 1).bytes]).max_results
    };
    let errors = registry.add_text("a", "9 1 1 max-reply=1\n\n9 0x1 1 max-reply=2");
    assert_eq!(errors, ["a:3:1: 9 1 1 is already given in line 1"]);
    let errors = Registry::built_in().add_text("a", "  9 1 1  results=int,\u{fc},data<8>");
    assert!(errors[0].starts_with("a:1:22: \"\u{fc}\": must be int, "), "{errors:?}");
    assert_eq!(most(), Some(1));
    assert_eq!(registry.add_text("b", "9 1 1 max-reply=3"), [""; 0]);
    assert_eq!(most(), Some(3));
}

#[test]
fn a_call_without_a_binding_and_without_rpcsec_gss_needs_no_look() {
    let registry = Registry::built_in();
    let alone = |call: &Xdr| registry.leaves_alone(Some(&call.bytes));
    assert!(alone(&call(400_000, 1, 7)) && !alone(&call(100_003, 3, 7)) && !alone(&gss_call(0, 1)));
    let mut unknown = gss_call(0, 2);
    unknown.bytes[12..16].copy_from_slice(&400_000u32.to_be_bytes());
    assert!(!alone(&unknown), "whether its results are wrapped matters");
    assert!(!alone(&reply()) && !registry.leaves_alone(None));
}

/// A lock that the other thread held at the fork would be held in the child for ever.
#[test]
fn a_child_finds_and_adds_bindings_whatever_another_thread_was_adding_at_the_fork() {
    let registry = Registry::built_in();
    let done = AtomicBool::new(false);
    let text: String = (0..300).map(|n| format!("400000 1 {n} arguments=data\n")).collect();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in (0..1000).take_while(|_| !done.load(Relaxed)) {
                assert!(registry.add_text("a text", &text).is_empty());
                std::thread::yield_now();
            }
        });
        for _ in 0..100 {
            let child = fork::testing::fork(|| {
                let added = registry.add(400_001, 1, 1, Box::new(|_| Ok(())), Box::new(|_| Ok(())));
                added.is_ok()
                    && registry.find(100_003, 3, 7).is_some()
                    && registry.find(400_001, 1, 1).is_some()
            });
            assert!(child.succeeded());
        }
        done.store(true, Relaxed);
    });
    assert!(registry.find(400_001, 1, 1).is_none());
    assert!(
        registry.add(400_000, 1, 1, Box::new(|_| Ok(())), Box::new(|_| Ok(()))).is_ok(),
        "replaces a text's"
    );
    assert!(registry.add(400_000, 1, 1, Box::new(|_| Ok(())), Box::new(|_| Ok(()))).is_err());
}

/// Each of a thousand procedures may have a binding.
#[test]
fn a_call_costs_hardly_more_when_many_procedures_have_bindings() {
    let registry = Registry::built_in();
    let looks = || {
        let time = |_| {
            let begin = Instant::now();
            assert!((0..1000).all(|_| registry.find(100_003, 3, 7).is_some()));
            begin.elapsed()
        };
        (0..5).map(time).min().unwrap()
    };
    let before = looks();
    for procedure in 0..4000 {
        registry.add(400_000, 1, procedure, Box::new(|_| Ok(())), Box::new(|_| Ok(()))).unwrap();
    }
    let after = looks();
    assert!(after < 200 * before, "{after:?}, and {before:?} before");
    assert!((0..4000).all(|procedure| registry.find(400_000, 1, procedure).is_some()));
    assert!(registry.knows(400_000, 1) && !registry.knows(400_000, 2));
}
