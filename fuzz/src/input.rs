//! The bytes of an input, as numbers and choices. What is taken beyond the end is 0: a shorter input means something too.

/// What is left of an input.
#[derive(Clone)]
pub struct Input<'a> {
    rest: &'a [u8],
}

impl<'a> Input<'a> {
    pub fn new(rest: &'a [u8]) -> Input<'a> {
        Input { rest }
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub fn byte(&mut self) -> u8 {
        let Some((first, rest)) = self.rest.split_first() else { return 0 };
        self.rest = rest;
        *first
    }

    pub fn half(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    pub fn word(&mut self) -> u32 {
        u32::from(self.half()) << 16 | u32::from(self.half())
    }

    /// A number below `end`, or 0 if there is none.
    pub fn below(&mut self, end: usize) -> usize {
        let number = if end <= 256 { usize::from(self.byte()) } else { self.word() as usize };
        if end == 0 { 0 } else { number % end }
    }

    pub fn chance(&mut self) -> bool {
        self.byte() & 1 == 1
    }

    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// At most `most` bytes.
    pub fn bytes(&mut self, most: usize) -> &'a [u8] {
        let (bytes, rest) = self.rest.split_at(most.min(self.rest.len()));
        self.rest = rest;
        bytes
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }
}

/// Cuts bytes into pieces whose lengths follow from `seed`: some are empty. Seed 0 leaves them whole.
pub fn pieces(bytes: &[u8], seed: u8) -> Vec<&[u8]> {
    if seed == 0 {
        return vec![bytes];
    }
    let (mut rest, mut state) = (bytes, usize::from(seed));
    let mut pieces = Vec::new();
    while !rest.is_empty() {
        let (piece, left) = rest.split_at((state % 13).min(rest.len()));
        pieces.push(piece);
        rest = left;
        state = (state * 7 + 1) % 1009;
    }
    pieces
}
