//! Plain tables for people: columns as wide as their widest cell, two spaces between, numbers to the right.

/// One column.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    name: &'static str,
    align: Align,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Align {
    Left,
    Right,
}

/// A column of words.
pub(crate) const fn words(name: &'static str) -> Column {
    Column { name, align: Align::Left }
}

/// A column of numbers.
pub(crate) const fn numbers(name: &'static str) -> Column {
    Column { name, align: Align::Right }
}

/// Lays `rows` out under `columns`, one line each, without trailing spaces.
pub(crate) fn render<const N: usize>(columns: [Column; N], rows: &[[String; N]]) -> String {
    let header = columns.map(|column| column.name.to_ascii_uppercase());
    let widths: [usize; N] = std::array::from_fn(|i| {
        std::iter::once(&header).chain(rows).map(|row| width(&row[i])).max().unwrap_or_default()
    });
    let mut text = String::new();
    for row in std::iter::once(&header).chain(rows) {
        let mut line = String::new();
        for ((cell, column), width_of_column) in row.iter().zip(columns).zip(widths) {
            let padding = " ".repeat(width_of_column - width(cell));
            match column.align {
                Align::Left => line.extend([cell, &padding, "  "]),
                Align::Right => line.extend([&padding, cell, "  "]),
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn width(cell: &str) -> usize {
    cell.chars().count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_numbers_stand_to_the_right() {
        let rows = [["relay-a".to_owned(), "7".to_owned()], ["b".to_owned(), "1200".to_owned()]];
        assert_eq!(
            render([words("owner"), numbers("lag")], &rows),
            "OWNER     LAG\nrelay-a     7\nb        1200\n"
        );
    }

    #[test]
    fn an_empty_table_is_its_header() {
        assert_eq!(render([words("owner"), numbers("lag")], &[]), "OWNER  LAG\n");
    }
}
