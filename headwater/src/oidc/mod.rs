//! Logins of people with an identity provider that speaks OpenID Connect.
//!
//! `control/service/src/login.rs` shows the messages. Here are: the requests to the identity provider and the checks of its
//! ID token (`provider.rs`, `web.rs`), the roles of groups (`rules.rs`), and the command line, which waits for the browser
//! (`login.rs`).
//!
//! # Not here
//! Client secrets: the client is public, and PKCE protects the code. Refresh tokens and logout at the identity provider.

mod login;
mod provider;
mod query;
mod rules;
mod web;

pub use self::login::log_in;
pub use self::provider::Provider;
pub use self::rules::Settings;
