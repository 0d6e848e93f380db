//! SQL statements with values, and the rows of their results, for SQLite and PostgreSQL.
//!
//! Both databases use `$1`, `$2`, .. for values, so that a statement is written once.

use sqlx::postgres::{PgArguments, PgRow, Postgres};
use sqlx::query::Query;
use sqlx::sqlite::{Sqlite, SqliteArguments, SqliteRow};
use sqlx::{AssertSqlSafe, Decode, Row as _, Type};
use uuid::Uuid;

use crate::error::DbError;

/// A value of a statement.
#[derive(Clone)]
pub(crate) enum Value {
    Text(Option<String>),
    Number(Option<i64>),
    Flag(bool),
    Bytes(Option<Vec<u8>>),
}

impl From<Vec<u8>> for Value {
    fn from(bytes: Vec<u8>) -> Self {
        Self::Bytes(Some(bytes))
    }
}

impl From<Option<Vec<u8>>> for Value {
    fn from(bytes: Option<Vec<u8>>) -> Self {
        Self::Bytes(bytes)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(Some(text.to_owned()))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(Some(text))
    }
}

impl From<&String> for Value {
    fn from(text: &String) -> Self {
        Self::Text(Some(text.clone()))
    }
}

impl From<Option<&str>> for Value {
    fn from(text: Option<&str>) -> Self {
        Self::Text(text.map(str::to_owned))
    }
}

impl From<&Option<String>> for Value {
    fn from(text: &Option<String>) -> Self {
        Self::Text(text.clone())
    }
}

impl From<Uuid> for Value {
    fn from(id: Uuid) -> Self {
        Self::Text(Some(id.to_string()))
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Self::Number(Some(number))
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Number(Some(i64::from(number)))
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Number(Some(stored(number)))
    }
}

impl From<Option<u64>> for Value {
    fn from(number: Option<u64>) -> Self {
        Self::Number(number.map(stored))
    }
}

impl From<bool> for Value {
    fn from(flag: bool) -> Self {
        Self::Flag(flag)
    }
}

/// Converts to the signed integers of both databases. All sizes and times are far below the limit; a larger number is
/// stored as the limit.
fn stored(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Converts a stored number back.
pub(crate) fn loaded(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}

/// A statement and its values.
#[derive(Clone)]
pub(crate) struct Statement {
    text: String,
    values: Vec<Value>,
}

impl Statement {
    /// A statement; values are added with [`Statement::bind`].
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), values: Vec::new() }
    }

    /// Adds the next value.
    pub(crate) fn bind(mut self, value: impl Into<Value>) -> Self {
        self.values.push(value.into());
        self
    }

    /// Adds several values.
    pub(crate) fn bind_all(mut self, values: Vec<Value>) -> Self {
        self.values.extend(values);
        self
    }

    /// The statement for SQLite.
    pub(crate) fn sqlite(self) -> Query<'static, Sqlite, SqliteArguments> {
        // The text is from this crate only; external data is in the values.
        let query = sqlx::query(AssertSqlSafe(self.text));
        self.values.into_iter().fold(query, |query, value| match value {
            Value::Text(text) => query.bind(text),
            Value::Number(number) => query.bind(number),
            Value::Flag(flag) => query.bind(flag),
            Value::Bytes(bytes) => query.bind(bytes),
        })
    }

    /// The statement for PostgreSQL.
    pub(crate) fn postgres(self) -> Query<'static, Postgres, PgArguments> {
        let query = sqlx::query(AssertSqlSafe(self.text));
        self.values.into_iter().fold(query, |query, value| match value {
            // PostgreSQL has no NUL character in texts, and would fail the whole transaction.
            Value::Text(text) => query.bind(text.map(|text| text.replace('\0', "\u{fffd}"))),
            Value::Number(number) => query.bind(number),
            Value::Flag(flag) => query.bind(flag),
            Value::Bytes(bytes) => query.bind(bytes),
        })
    }
}

/// A row to insert, with columns and values side by side.
pub(crate) struct Insert {
    table: &'static str,
    columns: Vec<&'static str>,
    values: Vec<Value>,
}

impl Insert {
    /// An insertion into a table.
    pub(crate) fn into(table: &'static str) -> Self {
        Self { table, columns: Vec::new(), values: Vec::new() }
    }

    /// Adds a column with its value.
    pub(crate) fn set(mut self, column: &'static str, value: impl Into<Value>) -> Self {
        self.columns.push(column);
        self.values.push(value.into());
        self
    }

    /// The statement that inserts the row, with `end` after it.
    pub(crate) fn statement(self, end: &str) -> Statement {
        let Self { table, columns, values } = self;
        let numbers: Vec<String> = (1..=columns.len()).map(|n| format!("${n}")).collect();
        let text =
            format!("INSERT INTO {table} ({}) VALUES ({}) {end}", columns.join(", "), numbers.join(", "));
        Statement::new(text).bind_all(values)
    }
}

/// A row of a result.
pub(crate) enum Row {
    Sqlite(SqliteRow),
    Postgres(PgRow),
}

impl Row {
    /// The value of a column.
    pub(crate) fn get<T>(&self, column: &'static str) -> Result<T, DbError>
    where
        T: for<'r> Decode<'r, Sqlite> + Type<Sqlite> + for<'r> Decode<'r, Postgres> + Type<Postgres>,
    {
        match self {
            Self::Sqlite(row) => Ok(row.try_get(column)?),
            Self::Postgres(row) => Ok(row.try_get(column)?),
        }
    }

    /// A size or time.
    pub(crate) fn number(&self, column: &'static str) -> Result<u64, DbError> {
        self.get(column).map(loaded)
    }

    /// The same, which may be absent.
    pub(crate) fn maybe_number(&self, column: &'static str) -> Result<Option<u64>, DbError> {
        Ok(self.get::<Option<i64>>(column)?.map(loaded))
    }

    /// A count, which may be absent.
    pub(crate) fn maybe_count(&self, column: &'static str) -> Result<Option<u32>, DbError> {
        let number: Option<i64> = self.get(column)?;
        let read = |number: i64| u32::try_from(number).map_err(|_| unreadable(column, &number.to_string()));
        number.map(read).transpose()
    }

    /// A count.
    pub(crate) fn count(&self, column: &'static str) -> Result<u32, DbError> {
        let number: i64 = self.get(column)?;
        u32::try_from(number).map_err(|_| unreadable(column, &number.to_string()))
    }

    /// An identity.
    pub(crate) fn uuid(&self, column: &'static str) -> Result<Uuid, DbError> {
        self.read(column, |text| Uuid::parse_str(text).ok())
    }

    /// Parses the text of a column.
    pub(crate) fn read<T>(
        &self,
        column: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<T, DbError> {
        let text: String = self.get(column)?;
        parse(&text).ok_or_else(|| unreadable(column, &text))
    }
}

/// The error for a value that a column cannot have.
pub(crate) fn unreadable(column: &'static str, found: &str) -> DbError {
    DbError::Unreadable { column, found: found.to_owned() }
}
