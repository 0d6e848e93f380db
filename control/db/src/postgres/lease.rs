//! The lease on a database, which ensures that one daemon changes it at a time.
//!
//! ```text
//!   take:  under the writers' lock: if another holder's time is not over, or that holder did not end in order -> refused,
//! with its name
//!          else fence = fence + 1, until = the server's clock + LEASE_S
//!   write: under the same lock, first: is `fence` still ours? If not, another daemon has the database, and nothing is
//! changed
//!   renew: every RENEW_INTERVAL, until = the server's clock + LEASE_S, if `fence` is ours
//! ```
//! A holder does not compare `until` with its own clock: until another daemon takes the lease, it may write, even after the
//! database could not be reached for a while. `until` only says from when on another daemon may take the lease.

use std::time::Duration;

use sqlx::postgres::PgConnection;

use crate::error::DbError;
use crate::postgres::connections::PostgresUnit;
use crate::postgres::failure;
use crate::postgres::place::Place;
use crate::sql::{Row, Statement};

/// The resource of the lease.
const RESOURCE: &str = "controller";

/// How long a lease lasts, in seconds.
pub const LEASE_S: i64 = 4;

/// How often a lease is renewed.
pub const RENEW_INTERVAL: Duration = Duration::from_secs(1);

/// A daemon that uses a database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// The identity of its data directory, which only one daemon uses at a time.
    pub id: String,
    /// Its host and data directory, for people.
    pub name: String,
}

/// When a lease may be taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taking {
    /// If no other daemon has it, or the last holder ended in order.
    IfFree,
    /// Also if the last holder's time is over.
    IfOver,
}

/// Selects the holder and the remaining time.
fn found() -> Statement {
    let found = "SELECT holder, name, is_ended, greatest(0, ceil(extract(epoch FROM until - clock_timestamp())))::bigint AS left_s
         FROM leases WHERE resource = $1";
    Statement::new(found).bind(RESOURCE)
}

/// Fails if another daemon has the lease.
fn is_free(place: &Place, row: Option<&Row>, holder: &Holder, taking: Taking) -> Result<(), DbError> {
    let Some(row) = row else { return Ok(()) };
    let (other, name): (String, String) = (row.get("holder")?, row.get("name")?);
    let (is_ended, left_s): (bool, i64) = (row.get("is_ended")?, row.get("left_s")?);
    // A copy of a data directory has the same id, but not the same host and path.
    let is_same = other == holder.id && (name == holder.name || left_s == 0);
    if is_ended || is_same || (left_s == 0 && taking == Taking::IfOver) {
        return Ok(());
    }
    Err(DbError::Held { place: place.to_string(), name, left_s: u64::try_from(left_s).unwrap_or(0) })
}

/// Fails if another daemon has the lease. Runs before migrations, after which an older daemon could not read the tables.
pub(super) async fn look(
    place: &Place,
    connection: &mut PgConnection,
    holder: &Holder,
    taking: Taking,
) -> Result<(), DbError> {
    let failed = |error| failure::of_statement(place, error);
    let exists: bool = sqlx::query_scalar("SELECT to_regclass('leases') IS NOT NULL")
        .fetch_one(&mut *connection)
        .await
        .map_err(failed)?;
    if !exists {
        return Ok(());
    }
    let row = found().postgres().fetch_optional(connection).await.map_err(failed)?;
    is_free(place, row.map(Row::Postgres).as_ref(), holder, taking)
}

/// Takes the lease and returns its fence (a number that grows with each holder).
pub(super) async fn take(
    place: &Place,
    unit: &mut PostgresUnit,
    holder: &Holder,
    taking: Taking,
) -> Result<i64, DbError> {
    let rows = unit.rows(found()).await?;
    is_free(place, rows.first(), holder, taking)?;
    let take = format!(
        "INSERT INTO leases (resource, holder, name, fence, until, is_ended)
         VALUES ($1, $2, $3, 1, clock_timestamp() + interval '{LEASE_S} s', FALSE)
         ON CONFLICT (resource) DO UPDATE SET holder = $2, name = $3, fence = leases.fence + 1, until = excluded.until, is_ended = FALSE
         RETURNING fence"
    );
    let take = Statement::new(take).bind(RESOURCE).bind(&holder.id).bind(&holder.name);
    let rows = unit.rows(take).await?;
    rows.first().map_or(Err(DbError::StatementFailed), |row| row.get("fence"))
}

/// The first statement of a writer's transaction: it returns a row if the fence is still ours.
pub(super) fn check(fence: i64) -> String {
    format!("SELECT 1 FROM leases WHERE resource = '{RESOURCE}' AND fence = {fence}")
}

/// Extends the lease.
pub(super) async fn renew(unit: &mut PostgresUnit) -> Result<(), DbError> {
    let renew =
        format!("UPDATE leases SET until = clock_timestamp() + interval '{LEASE_S} s' WHERE resource = $1");
    unit.run(Statement::new(renew).bind(RESOURCE)).await.map(drop)
}

/// Ends the lease in order: another daemon may take it at once.
pub(super) async fn end(unit: &mut PostgresUnit) -> Result<(), DbError> {
    let end = "UPDATE leases SET until = clock_timestamp(), is_ended = TRUE WHERE resource = $1";
    unit.run(Statement::new(end).bind(RESOURCE)).await.map(drop)
}

/// The name of the present holder.
pub(super) async fn holder(unit: &mut PostgresUnit) -> Result<String, DbError> {
    let rows =
        unit.rows(Statement::new("SELECT name FROM leases WHERE resource = $1").bind(RESOURCE)).await?;
    rows.first().map_or(Ok(String::new()), |row| row.get("name"))
}
