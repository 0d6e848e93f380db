//! Writes one self-contained HTML page: paragraphs, tiles, tables and plots, in the order in which they are added.

use std::fmt::Write;

use crate::svg::escape;

const STYLE: &str = include_str!("page.css");

/// The style of a paragraph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tone {
    /// Text.
    Plain,
    /// Details.
    Quiet,
    /// A warning.
    Warning,
}

/// A figure in large type with explanations.
#[derive(Clone, Debug)]
pub struct Tile {
    /// The figure.
    pub value: String,
    /// The name of the figure.
    pub label: String,
    /// The value that it is compared with.
    pub note: String,
}

/// A column of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Column {
    /// Words.
    Text(&'static str),
    /// Figures, at the right.
    Figure(&'static str),
}

impl Column {
    /// The heading of the column.
    pub fn title(self) -> &'static str {
        match self {
            Self::Text(title) | Self::Figure(title) => title,
        }
    }

    fn class(self) -> &'static str {
        match self {
            Self::Text(_) => "text",
            Self::Figure(_) => "figure",
        }
    }
}

/// A page under construction. Writing to its string cannot fail.
pub struct Page(String);

impl Page {
    /// A page with a title, and a line above it.
    pub fn new(kicker: &str, title: &str) -> Self {
        let (kicker, title) = (escape(kicker), escape(title));
        Self(format!(
            "<!DOCTYPE html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"/>\
             <meta name=\"viewport\" content=\"width=device-width\"/><title>{title}</title>\
             <style>{STYLE}</style></head>\n<body>\n<header><p class=\"kicker\">{kicker}</p><h1>{title}</h1></header>\n"
        ))
    }

    /// Adds a heading.
    pub fn heading(&mut self, text: &str) {
        let _ = writeln!(self.0, "<h2>{}</h2>", escape(text));
    }

    /// Adds a paragraph.
    pub fn paragraph(&mut self, tone: Tone, text: &str) {
        let class = match tone {
            Tone::Plain => "plain",
            Tone::Quiet => "quiet",
            Tone::Warning => "warning",
        };
        let _ = writeln!(self.0, "<p class=\"{class}\">{}</p>", escape(text));
    }

    /// Adds a command line.
    pub fn command(&mut self, text: &str) {
        let _ = writeln!(self.0, "<p><code>{}</code></p>", escape(text));
    }

    /// Adds figures in large type, side by side.
    pub fn tiles(&mut self, tiles: &[Tile]) {
        self.0.push_str("<div class=\"tiles\">\n");
        for tile in tiles {
            let _ = writeln!(
                self.0,
                "<div class=\"tile\"><p class=\"value\">{}</p><p class=\"label\">{}</p><p class=\"quiet\">{}</p></div>",
                escape(&tile.value),
                escape(&tile.label),
                escape(&tile.note)
            );
        }
        self.0.push_str("</div>\n");
    }

    /// Adds a list.
    pub fn list(&mut self, items: &[String]) {
        self.0.push_str("<ul>\n");
        for item in items {
            let _ = writeln!(self.0, "<li>{}</li>", escape(item));
        }
        self.0.push_str("</ul>\n");
    }

    /// Adds a table with a caption.
    pub fn table(&mut self, caption: &str, head: &[Column], rows: &[Vec<String>]) {
        let _ =
            write!(self.0, "<div class=\"wide\"><table><caption>{}</caption><thead><tr>", escape(caption));
        for column in head {
            let _ = write!(self.0, "<th class=\"{}\">{}</th>", column.class(), escape(column.title()));
        }
        self.0.push_str("</tr></thead><tbody>\n");
        for row in rows {
            self.0.push_str("<tr>");
            for (column, cell) in head.iter().zip(row) {
                let _ = write!(self.0, "<td class=\"{}\">{}</td>", column.class(), escape(cell));
            }
            self.0.push_str("</tr>\n");
        }
        self.0.push_str("</tbody></table></div>\n");
    }

    /// Adds a plot: an SVG element of a chart in [`crate::svg`].
    pub fn plot(&mut self, caption: &str, svg: &str) {
        let caption = escape(caption);
        let _ = writeln!(self.0, "<figure>{svg}<figcaption>{caption}</figcaption></figure>");
    }

    /// Completes the page, and returns its text.
    pub fn finish(mut self) -> String {
        self.0.push_str("</body></html>\n");
        self.0
    }
}

/// Formats the same table as text, with aligned columns.
pub fn text_table(head: &[Column], rows: &[Vec<String>]) -> String {
    let titles = head.iter().map(|column| column.title().to_owned()).collect::<Vec<String>>();
    let mut text = String::new();
    for row in std::iter::once(&titles).chain(rows) {
        let mut line = String::new();
        for (index, (column, cell)) in head.iter().zip(row).enumerate() {
            let cells = std::iter::once(&titles).chain(rows).filter_map(|row| row.get(index));
            let width = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
            let _ = match column {
                Column::Text(_) => write!(line, "{cell:<width$}  "),
                Column::Figure(_) => write!(line, "{cell:>width$}  "),
            };
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_self_contained_and_escaped() {
        let mut page = Page::new("k", "a & b");
        page.paragraph(Tone::Warning, "x < y");
        page.table("t", &[Column::Text("case")], &[vec!["<raw>".into()]]);
        let text = page.finish();
        assert!(text.contains("<h1>a &amp; b</h1>") && text.contains(">&lt;raw&gt;</td>"), "{text}");
        assert!(text.contains("class=\"warning\">x &lt; y") && !text.contains("<script"));
        assert!(!STYLE.contains("url(") && !STYLE.contains("@import") && !STYLE.contains('<'));
    }

    #[test]
    fn a_text_table_aligns_figures_at_the_right() {
        let head = [Column::Text("a"), Column::Figure("bb")];
        assert_eq!(text_table(&head, &[vec!["long".into(), "1".into()]]), "a     bb\nlong   1\n");
    }
}
