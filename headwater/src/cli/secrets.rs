//! Subcommands and options of `headwater secrets`: the key with which secrets in the database are encrypted.

use clap::Subcommand;

use crate::database::DatabaseArgs;

/// `headwater secrets ...`.
#[derive(Debug, Subcommand)]
pub enum SecretsCommand {
    /// Encrypt the secrets in the database with a new key, which replaces the file with the key; the daemon does not run meanwhile
    RotateKey {
        /// The database and the file, as they are given to 'headwater serve'
        #[command(flatten)]
        database: DatabaseArgs,
    },
}
