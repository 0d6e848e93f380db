//! The lease on a database: one daemon changes it.
//!
//! ```text
//!   take:  under the writers' lock: another holder whose time is not over, or that did not end in order -> refused, by name
//!          else fence = fence + 1, until = the server's clock + LEASE_S
//!   write: under the same lock, first: does the row have our fence? If not, another daemon has the database, and nothing is changed
//!   renew: every RENEW_INTERVAL, until = the server's clock + LEASE_S, where the row has our fence
//! ```
//! The rights of a holder do not depend on its clock: as long as nobody took the lease, it may write, also after a time in which the
//! database was away. `until` only says when somebody else may take it.

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
    /// The identity of its data directory: two daemons never use one at a time.
    pub id: String,
    /// For people: the host, and the data directory.
    pub name: String,
}

/// How a lease is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Taking {
    /// If nobody else has it, or the last holder ended in order.
    IfFree,
    /// Also if the last holder's time is over.
    IfOver,
}

/// Who has it, and for how long.
fn found() -> Statement {
    let found = "SELECT holder, name, is_ended, greatest(0, ceil(extract(epoch FROM until - clock_timestamp())))::bigint AS left_s
         FROM leases WHERE resource = $1";
    Statement::new(found).bind(RESOURCE)
}

/// Refuses what another daemon has.
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

/// The same before the tables are brought up to date: another daemon that uses them would not understand them any more.
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

/// Takes the lease, and gives its fence.
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
    rows.first().map_or(Err(DbError::Spoilt), |row| row.get("fence"))
}

/// The statement that a writer's unit begins with: it has a row if the fence is right.
pub(super) fn check(fence: i64) -> String {
    format!("SELECT 1 FROM leases WHERE resource = '{RESOURCE}' AND fence = {fence}")
}

/// Has it last for longer.
pub(super) async fn renew(unit: &mut PostgresUnit) -> Result<(), DbError> {
    let renew =
        format!("UPDATE leases SET until = clock_timestamp() + interval '{LEASE_S} s' WHERE resource = $1");
    unit.run(Statement::new(renew).bind(RESOURCE)).await.map(drop)
}

/// Ends it in order: another daemon may take it at once.
pub(super) async fn end(unit: &mut PostgresUnit) -> Result<(), DbError> {
    let end = "UPDATE leases SET until = clock_timestamp(), is_ended = TRUE WHERE resource = $1";
    unit.run(Statement::new(end).bind(RESOURCE)).await.map(drop)
}

/// Who has it.
pub(super) async fn holder(unit: &mut PostgresUnit) -> Result<String, DbError> {
    let rows =
        unit.rows(Statement::new("SELECT name FROM leases WHERE resource = $1").bind(RESOURCE)).await?;
    rows.first().map_or(Ok(String::new()), |row| row.get("name"))
}
