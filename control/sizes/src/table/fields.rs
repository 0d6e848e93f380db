//! Splits a line of a table into fields, and finds a field by the name of its column.

use std::borrow::Cow;

use super::TableError;

/// The longest line, in bytes.
const MAX_LINE_BYTES: usize = 64 << 10;

/// One line. Quotes follow RFC 4180, except that a field must not contain a line end.
pub struct Row<'a> {
    line: usize,
    columns: &'a [String],
    fields: Vec<Field<'a>>,
}

struct Field<'a> {
    text: Cow<'a, str>,
    /// The position of its first character, from 1.
    character: usize,
}

/// Parses the column names: each of `known` exactly once, and each of `extra` at most once.
pub fn header(line: usize, text: &str, known: &[&str], extra: &[&str]) -> Result<Vec<String>, TableError> {
    let fields = split(line, text)?;
    let mut names: Vec<String> = Vec::new();
    for field in fields {
        let name = field.text.trim();
        let wrong = |why: String| TableError::Field {
            line,
            character: field.character,
            column: name.to_owned(),
            why,
        };
        if !known.iter().chain(extra).any(|known| *known == name) {
            return Err(wrong(format!("there is no column '{name}': the columns are {}", known.join(","))));
        }
        if names.iter().any(|other| other == name) {
            return Err(wrong(format!("the column '{name}' occurs twice")));
        }
        names.push(name.to_owned());
    }
    match known.iter().find(|known| !names.iter().any(|name| name == *known)) {
        Some(missing) => {
            let why = format!("the column '{missing}' is missing: the columns are {}", known.join(","));
            Err(TableError::Line { line, why })
        }
        None => Ok(names),
    }
}

impl<'a> Row<'a> {
    /// Splits a line into fields.
    pub fn parse(line: usize, text: &'a str, columns: &'a [String]) -> Result<Self, TableError> {
        let fields = split(line, text)?;
        if fields.len() != columns.len() {
            let why =
                format!("the line has {} fields, but there are {} columns", fields.len(), columns.len());
            return Err(TableError::Line { line, why });
        }
        Ok(Self { line, columns, fields })
    }

    fn field(&self, column: &str) -> Option<&Field<'a>> {
        let at = self.columns.iter().position(|name| name == column)?;
        self.fields.get(at)
    }

    /// The text of the field; empty if there is no such column.
    pub fn text(&self, column: &str) -> &str {
        self.field(column).map_or("", |field| field.text.trim())
    }

    /// An error about a field.
    pub fn wrong(&self, column: &str, why: String) -> TableError {
        let character = self.field(column).map_or(1, |field| field.character);
        TableError::Field { line: self.line, character, column: column.to_owned(), why }
    }

    /// Parses a field that must not be empty.
    pub fn required<T>(
        &self,
        column: &str,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Result<T, TableError> {
        match self.text(column) {
            "" => Err(self.wrong(column, "the field is empty, but must have a value".to_owned())),
            text => read(text).map_err(|why| self.wrong(column, why)),
        }
    }

    /// Parses a field that may be empty, because the figure is not published.
    pub fn optional<T>(
        &self,
        column: &str,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Option<T>, TableError> {
        match self.text(column) {
            "" => Ok(None),
            text => read(text).map(Some).map_err(|why| self.wrong(column, why)),
        }
    }

    /// Parses a field with several values, separated by `|`, each at most once.
    pub fn list<T: PartialEq>(
        &self,
        column: &str,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Vec<T>, TableError> {
        let mut values = Vec::new();
        for text in self.text(column).split('|') {
            let value = read(text.trim()).map_err(|why| self.wrong(column, why))?;
            if values.contains(&value) {
                return Err(self.wrong(column, format!("'{text}' occurs twice")));
            }
            values.push(value);
        }
        Ok(values)
    }
}

/// Splits a line at its commas, except inside quotes.
fn split(line: usize, text: &str) -> Result<Vec<Field<'_>>, TableError> {
    if text.len() > MAX_LINE_BYTES {
        return Err(TableError::Line {
            line,
            why: format!("the line is longer than {MAX_LINE_BYTES} bytes"),
        });
    }
    let mut fields = Vec::new();
    let mut rest = text;
    let mut character = 1;
    loop {
        let (field, taken_bytes) = first_field(rest)
            .map_err(|why| TableError::Line { line, why: format!("character {character}: {why}") })?;
        fields.push(Field { text: field, character });
        let (taken, after) = rest.split_at(taken_bytes);
        character += taken.chars().count() + 1;
        match after.strip_prefix(',') {
            Some(next) => rest = next,
            None => return Ok(fields),
        }
    }
}

/// The first field, and the number of bytes that it occupies with its quotes.
fn first_field(rest: &str) -> Result<(Cow<'_, str>, usize), &'static str> {
    let Some(quoted) = rest.strip_prefix('"') else {
        let end = rest.find(',').unwrap_or(rest.len());
        let field = rest.get(..end).unwrap_or(rest);
        return match field.contains('"') {
            true => Err(
                "a quote in the middle of a field: put the whole field in quotes, and write \"\" for a quote",
            ),
            false => Ok((Cow::Borrowed(field), end)),
        };
    };
    let mut text = String::new();
    let mut at = quoted.char_indices().peekable();
    while let Some((index, c)) = at.next() {
        if c != '"' {
            text.push(c);
        } else if at.peek().is_some_and(|(_, next)| *next == '"') {
            at.next();
            text.push('"');
        } else {
            // The opening quote, the text, and this closing quote.
            let taken_bytes = index + 2;
            let is_at_end =
                rest.get(taken_bytes..).is_some_and(|after| after.is_empty() || after.starts_with(','));
            return match is_at_end {
                true => Ok((Cow::Owned(text), taken_bytes)),
                false => Err("there is text after the closing quote of a field"),
            };
        }
    }
    Err("a quote is not closed: a field must not contain a line end")
}
