//! Text of others, rpcbind's of another host say, on a terminal.

/// The text without what a terminal would obey, and not without end.
pub fn shown(text: &str) -> String {
    const MAX: usize = 2000;
    let plain = |c: char| if c.is_control() || is_format(c) { '?' } else { c };
    text.chars().take(MAX).map(plain).collect()
}

/// What turns the direction of writing or hides itself.
fn is_format(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_it_moves_the_cursor() {
        assert_eq!(shown("a\u{1b}[2J\n\u{202e}\u{9b}ü"), "a?[2J???ü");
        assert_eq!(shown(&"x".repeat(3000)).len(), 2000);
    }
}
