//! Tables of text. Columns are as wide as they need to be. A narrow screen gets fewer of them, each whole: half a number is
//! a different number.

/// A column.
#[derive(Clone, Copy, Debug)]
pub struct Column {
    pub title: &'static str,
    /// Left-aligned, as names are; numbers are right-aligned.
    pub left: bool,
    /// The least width, so that the column stays where it is while numbers grow.
    pub least: usize,
    /// A narrow screen leaves out the columns with the smallest weight first.
    pub weight: u8,
}

impl Column {
    pub const fn name(title: &'static str, least: usize, weight: u8) -> Column {
        Column { title, left: true, least, weight }
    }

    pub const fn number(title: &'static str, least: usize, weight: u8) -> Column {
        Column { title, left: false, least, weight }
    }
}

/// The title and the rows, a line each. `screen`: how many characters a line holds; without it there is no limit.
pub fn lines<const N: usize>(
    columns: &[Column; N],
    rows: &[[String; N]],
    screen: Option<usize>,
) -> Vec<String> {
    let widths: [usize; N] = std::array::from_fn(|at| {
        let cells = rows.iter().map(|row| row[at].chars().count());
        cells.chain([columns[at].title.len(), columns[at].least]).max().unwrap_or(0)
    });
    let mut shown: Vec<usize> = (0..N).collect();
    // With a space after each but the last.
    let needed = |shown: &[usize]| shown.iter().map(|at| widths[*at] + 1).sum::<usize>();
    while screen.is_some_and(|screen| needed(&shown) > screen + 1)
        && shown.len() > 1
        && let Some(least) = shown.iter().copied().min_by_key(|at| columns[*at].weight)
    {
        shown.retain(|at| *at != least);
    }
    let line = |cell: &dyn Fn(usize) -> String| {
        let cells = shown.iter().map(|&at| {
            let (text, width) = (cell(at), widths[at]);
            if columns[at].left { format!("{text:<width$}") } else { format!("{text:>width$}") }
        });
        cells.collect::<Vec<_>>().join(" ").trim_end().to_owned()
    };
    let mut lines = vec![line(&|at| columns[at].title.to_owned())];
    lines.extend(rows.iter().map(|row| line(&|at| row[at].clone())));
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 3] =
        [Column::name("NAME", 6, 3), Column::number("N", 3, 2), Column::name("WHAT", 0, 1)];

    fn table(screen: Option<usize>) -> Vec<String> {
        let row = |name: &str, n: &str, what: &str| [name, n, what].map(str::to_owned);
        lines(&COLUMNS, &[row("a", "12345", "something"), row("long name", "7", "")], screen)
    }

    #[test]
    fn a_column_is_as_wide_as_its_widest_cell() {
        assert_eq!(table(None), ["NAME          N WHAT", "a         12345 something", "long name     7"]);
    }

    #[test]
    fn a_narrow_screen_has_fewer_columns_and_each_is_whole() {
        assert_eq!(table(Some(25)), table(None));
        assert_eq!(table(Some(24)), ["NAME          N", "a         12345", "long name     7"]);
        assert_eq!(table(Some(14)), ["NAME", "a", "long name"]);
        assert_eq!(table(Some(0)), ["NAME", "a", "long name"]);
    }
}
