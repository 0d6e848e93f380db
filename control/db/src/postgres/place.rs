//! Parses the URL of a PostgreSQL database, which may contain no password, and keeps the options of connections.

use std::str::FromStr as _;

use sqlx::postgres::{PgConnectOptions, PgSslMode};

/// The parameters that a URL may have.
const PARAMETERS: [&str; 9] =
    ["host", "port", "user", "dbname", "sslmode", "sslrootcert", "sslcert", "sslkey", "application_name"];

/// Settings of each connection. If a client is gone, the server ends its transaction, so that the writers' lock is released
/// soon.
const SESSION: [(&str, &str); 8] = [
    ("idle_in_transaction_session_timeout", "60s"),
    ("statement_timeout", "60s"),
    ("lock_timeout", "30s"),
    ("tcp_keepalives_idle", "15"),
    ("tcp_keepalives_interval", "5"),
    ("tcp_keepalives_count", "3"),
    ("synchronous_commit", "on"),
    // Without this, each start would log that the tables exist.
    ("client_min_messages", "warning"),
];

/// Why the URL of a database was refused.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// It is not a URL of PostgreSQL. The message does not repeat the text, because it may be a password.
    #[error(
        "the name of the database is not a URL of PostgreSQL: write postgres://USER@HOST/DATABASE, or postgres:///DATABASE?host=/run/postgresql for a socket"
    )]
    NoUrl,
    /// It has a password, although other users of the host can read the arguments of a process.
    #[error(
        "the URL of the database has a password, which other users of this host could read: put it into a file \
         (--database-password-file), or into the credential 'database-password' of the service"
    )]
    Password,
    /// It names no database.
    #[error("the URL does not name a database: write postgres://USER@HOST/DATABASE")]
    NoDatabase,
    /// It has an unknown parameter.
    #[error(
        "the URL of the database has the parameter '{0}'; known are host, port, user, dbname, sslmode, sslrootcert, sslcert, sslkey and application_name"
    )]
    Parameter(String),
    /// It cannot be parsed.
    #[error("the URL of the database cannot be read")]
    Odd(#[source] sqlx::Error),
}

/// A PostgreSQL database.
#[derive(Clone)]
pub struct Place {
    options: PgConnectOptions,
    name: String,
}

impl Place {
    /// Parses `postgres://USER@HOST[:PORT]/DATABASE[?PARAMETER=VALUE&..]`. Other hosts than this one are reached over TLS
    /// with a verified certificate, unless `sslmode` or the variable `PGSSLMODE` says otherwise.
    pub fn parse(url: &str) -> Result<Self, PlaceError> {
        let rest = url.strip_prefix("postgres://").or_else(|| url.strip_prefix("postgresql://"));
        let rest = rest.ok_or(PlaceError::NoUrl)?;
        // This includes passwords with a '?' or a '/'. No message may show them.
        if rest.rsplit_once('@').is_some_and(|(before, _)| before.contains(':')) {
            return Err(PlaceError::Password);
        }
        let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
        let authority = before.split('/').next().unwrap_or_default();
        if authority.rsplit_once('@').is_some_and(|(user, _)| user.contains(':')) {
            return Err(PlaceError::Password);
        }
        for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
            let key = parameter.split('=').next().unwrap_or_default();
            if key == "password" {
                return Err(PlaceError::Password);
            }
            if !PARAMETERS.contains(&key) {
                return Err(PlaceError::Parameter(key.chars().take(40).collect()));
            }
        }
        // Like libpq: a user without a host. A general URL parser would refuse that.
        let socket = authority.strip_suffix('@').map(|user| {
            let database = before.get(authority.len()..).unwrap_or_default();
            format!("postgres://{database}?{query}{}user={user}", if query.is_empty() { "" } else { "&" })
        });
        let url = socket.as_deref().unwrap_or(url);
        let mut options = PgConnectOptions::from_str(url).map_err(PlaceError::Odd)?;
        if options.get_database().is_none_or(str::is_empty) {
            return Err(PlaceError::NoDatabase);
        }
        let says_how = query.contains("sslmode=") || std::env::var_os("PGSSLMODE").is_some();
        if !says_how && !is_here(&options) {
            options = options.ssl_mode(PgSslMode::VerifyFull);
        }
        if options.get_application_name().is_none() {
            options = options.application_name("headwater");
        }
        let name = name(&options);
        Ok(Self { options: options.options(SESSION), name })
    }

    /// Adds a password.
    #[must_use]
    pub fn with_password(mut self, password: &str) -> Self {
        self.options = self.options.password(password);
        self
    }

    pub(super) fn options(&self) -> &PgConnectOptions {
        &self.options
    }
}

/// Whether the server is on this host.
fn is_here(options: &PgConnectOptions) -> bool {
    let host = options.get_host();
    let is_loopback =
        host.trim_matches(['[', ']']).parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
    options.get_socket().is_some() || host.starts_with('/') || host == "localhost" || is_loopback
}

/// The name in messages: without secrets and parameters.
fn name(options: &PgConnectOptions) -> String {
    let database = options.get_database().unwrap_or_default();
    let user = options.get_username();
    match options.get_socket() {
        Some(directory) => format!("postgres://{user}@/{database}?host={}", directory.display()),
        None => format!("postgres://{user}@{}:{}/{database}", options.get_host(), options.get_port()),
    }
}

impl std::fmt::Display for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.name)
    }
}

impl std::fmt::Debug for Place {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Place").field(&self.name).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_says_where_and_keeps_no_secret() {
        for (url, name) in [
            ("postgres://anna@db.example.com/hw", "postgres://anna@db.example.com:5432/hw"),
            ("postgresql://anna@127.0.0.1:5433/hw?sslmode=disable", "postgres://anna@127.0.0.1:5433/hw"),
            ("postgres://anna@/hw?host=/run/pg", "postgres://anna@/hw?host=/run/pg"),
        ] {
            let place = Place::parse(url).unwrap().with_password("a secret");
            assert_eq!(place.to_string(), name);
            assert!(!format!("{place:?}").contains("secret"));
        }
        for (url, word) in [
            ("mysql://anna@h/hw", "not a URL of PostgreSQL"),
            ("/var/lib/headwater.db", "not a URL of PostgreSQL"),
            ("postgres://anna:secret@h/hw", "has a password"),
            ("postgres://anna@h/hw?password=secret", "has a password"),
            ("postgres://anna:se?cret@h/hw", "has a password"),
            ("postgres://anna:se/cret@h/hw", "has a password"),
            ("postgres://anna@h", "does not name a database"),
            ("postgres://anna@h/", "does not name a database"),
            ("postgres://anna@h/hw?ssl=on", "parameter 'ssl'"),
            ("postgres://anna@h:many/hw", "cannot be read"),
        ] {
            let error = Place::parse(url).unwrap_err().to_string();
            assert!(error.contains(word) && !error.contains("secret@"), "{url}: {error}");
        }
    }

    #[test]
    fn another_host_is_reached_with_a_verified_certificate() {
        let mode = |url: &str| Place::parse(url).unwrap().options().get_ssl_mode();
        assert!(matches!(mode("postgres://a@db.example.com/hw"), PgSslMode::VerifyFull));
        assert!(matches!(mode("postgres://a@db.example.com/hw?sslmode=require"), PgSslMode::Require));
        for here in ["postgres://a@localhost/hw", "postgres://a@[::1]/hw", "postgres://a@/hw?host=/run/pg"] {
            assert!(!matches!(mode(here), PgSslMode::VerifyFull), "{here}");
        }
    }
}
