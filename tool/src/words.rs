//! Other people's text on a terminal, such as that of another host's rpcbind.

use std::io;

/// The text without what a terminal would obey, and of limited length.
pub fn shown(text: &str) -> String {
    const MAX: usize = 2000;
    text.chars().take(MAX).map(|c| if is_harmful(c) { '?' } else { c }).collect()
}

/// Whether a terminal would obey it, it turns the direction of writing or is invisible, or XML does not allow it.
pub fn is_harmful(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
        // Noncharacters: the last two of each plane, and 32 more.
        || u32::from(c) & 0xfffe == 0xfffe
        || matches!(c, '\u{fdd0}'..='\u{fdef}')
}

/// As much of the text as a column has room for; `+` stands for the rest, as in the output of ps(1).
pub fn within(text: &str, room: usize) -> String {
    match text.char_indices().nth(room) {
        None => text.to_owned(),
        Some(_) => text.chars().take(room - 1).chain(['+']).collect(),
    }
}

/// The system's reason for an error, without its number.
pub fn reason(error: &io::Error) -> String {
    let text = error.to_string();
    let number = error.raw_os_error().map(|number| format!(" (os error {number})"));
    number.and_then(|number| text.strip_suffix(&number).map(str::to_owned)).unwrap_or(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_of_it_moves_the_cursor() {
        assert_eq!(shown("a\u{1b}[2J\n\u{202e}\u{9b}ü"), "a?[2J???ü");
        assert_eq!(shown("\u{61c}\u{feff}\u{fff9}\u{e0041}\u{ad}"), "?????");
        assert_eq!(shown(&"x".repeat(3000)).len(), 2000);
    }

    #[test]
    fn nothing_of_it_is_forbidden_in_xml() {
        assert_eq!(shown("\u{fffe}\u{ffff}\u{1fffe}\u{10ffff}\u{fdd0}\u{fffd}"), "?????\u{fffd}");
    }

    #[test]
    fn what_is_too_long_for_its_column_is_cut_and_says_so() {
        assert_eq!(["", "1234", "12345", "üüüüü"].map(|text| within(text, 4)), ["", "1234", "123+", "üüü+"]);
    }

    #[test]
    fn errors_are_told_in_words() {
        assert_eq!(reason(&io::Error::from_raw_os_error(2)), "No such file or directory");
        assert_eq!(reason(&io::Error::other("x (os error 2)")), "x (os error 2)");
    }
}
