//! Translates errors of PostgreSQL: can be retried ([`DbError::Away`]), needs a change ([`DbError::Refused`]), and the
//! reason in words.

use std::io::ErrorKind;

use sqlx::postgres::PgDatabaseError;

use crate::error::DbError;
use crate::postgres::place::Place;

/// The reason in words for a code of PostgreSQL (appendix "PostgreSQL Error Codes" of its manual).
fn meaning(code: &str) -> Option<&'static str> {
    Some(match code {
        "53300" => "it has no connection left (its max_connections, or a limit of the user or the database)",
        "57P03" => "it is starting or recovering",
        "57P01" | "57P02" => "it was shut down",
        "57P05" | "25P03" => "it ended a connection that was idle for too long",
        "55P03" => "another program holds a lock",
        "57014" => "it took longer than a minute",
        // A standby fails to begin a writer's transaction with the first of these codes.
        "0A000" | "25006" => "it is read-only: a standby, or one whose settings say so",
        "53200" => "it has no memory left",
        "08000" | "08003" | "08006" => "the connection broke off",
        _ => return None,
    })
}

/// The error of a failed statement.
pub(super) fn of_statement(place: &Place, error: sqlx::Error) -> DbError {
    let away = |why: String| DbError::Away { place: place.to_string(), why };
    match &error {
        sqlx::Error::Database(database) => {
            let code = database.code().unwrap_or_default().into_owned();
            match (code.as_str(), meaning(&code)) {
                ("53100", _) => DbError::NoSpace(Box::new(error)),
                ("XX001" | "XX002", _) => DbError::Damaged(error.to_string()),
                (_, Some(why)) => away(why.to_owned()),
                _ => DbError::Failed(error),
            }
        }
        sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) => {
            away(format!("the connection broke off: {}", cause(&error)))
        }
        _ => DbError::Failed(error),
    }
}

/// The error of a failed connection.
pub(super) fn of_connection(place: &Place, error: sqlx::Error) -> DbError {
    let away = |why: String| DbError::Away { place: place.to_string(), why };
    let refused = |why: &str| DbError::Refused { place: place.to_string(), why: why.to_owned() };
    match &error {
        sqlx::Error::Database(database) => {
            let message = database.try_downcast_ref::<PgDatabaseError>().map(PgDatabaseError::message);
            let message = message.unwrap_or_default();
            match database.code().unwrap_or_default().as_ref() {
                "28P01" => refused("the password is wrong, or missing"),
                "28000" => refused(&format!("it does not let this user in: {message}")),
                "3D000" => refused("there is no such database: 'createdb' makes it"),
                "42501" => refused(&format!("this user has no permission for it: {message}")),
                code => match meaning(code) {
                    Some(why) => away(why.to_owned()),
                    None => away(format!("it refused the connection: {message}")),
                },
            }
        }
        sqlx::Error::Io(io) => match io.kind() {
            ErrorKind::ConnectionRefused | ErrorKind::NotFound => {
                away("nothing listens at this address".to_owned())
            }
            ErrorKind::UnexpectedEof | ErrorKind::InvalidData => {
                refused("what answers there is not PostgreSQL")
            }
            _ => away(cause(&error)),
        },
        sqlx::Error::Protocol(_) => refused("what answers there is not PostgreSQL"),
        sqlx::Error::Tls(_) => refused(&format!(
            "TLS with it failed: {} ('sslrootcert' in the URL names the certificate authority, 'sslmode' what is verified)",
            cause(&error)
        )),
        sqlx::Error::Configuration(_) => refused(&cause(&error)),
        _ => away(cause(&error)),
    }
}

/// The innermost source of the error.
fn cause(error: &sqlx::Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(inner) = source {
        text = inner.to_string();
        source = inner.source();
    }
    text
}
