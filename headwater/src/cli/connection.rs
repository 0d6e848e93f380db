//! Subcommands and options of `headwater connection`: resource groups in Azure, and the identities with which the
//! controller uses them.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueHint};
use headwater_api::ConnectionAuth;

use crate::cli::complete;

/// `headwater connection ...`.
#[derive(Debug, Subcommand)]
pub enum ConnectionCommand {
    /// Add a connection to a resource group in Azure; 'check' then tries it
    Add(Box<AddConnectionArgs>),
    /// List all connections
    List,
    /// Show a connection
    Show {
        /// The connection
        #[arg(add = complete::connections())]
        connection: String,
    },
    /// Log in, read the resource group, and show the rights that the identity lacks
    Check {
        /// The connection
        #[arg(add = complete::connections())]
        connection: String,
    },
    /// Replace the client secret of a connection, for example before it expires; 'check' then tries it
    Set {
        /// The connection
        #[arg(add = complete::connections())]
        connection: String,
        /// The file with the new client secret. The secret is read once, and encrypted in the database
        #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
        secret_file: PathBuf,
    },
    /// List resources there that this controller made and that nothing needs any more, such as a disk of an upload
    Sweep {
        /// The connection
        #[arg(add = complete::connections())]
        connection: String,
        /// Remove those that an earlier sweep listed, at least 30 minutes ago. Resources of others are never removed
        #[arg(long)]
        remove: bool,
    },
    /// Remove a connection, with its secret; nothing is changed in Azure
    Remove {
        /// The connection
        #[arg(add = complete::connections())]
        connection: String,
        /// Also remove its catalogs with their machines, and its published versions, from the database; their resources
        /// in Azure stay, and cost. For a subscription, a resource group or an identity that is gone
        #[arg(long)]
        forget: bool,
    },
}

/// `headwater connection add`.
#[derive(Debug, Args)]
pub struct AddConnectionArgs {
    /// Its name: 1 to 63 of a-z, 0-9 and '-'
    pub connection: String,
    /// The subscription: a UUID
    #[arg(long, value_name = "UUID")]
    pub subscription: String,
    /// The tenant of the identity: a UUID or a domain
    #[arg(long)]
    pub tenant: String,
    /// The resource group, which must exist; everything is made in it
    #[arg(long)]
    pub group: String,
    /// The region, such as westeurope
    #[arg(long)]
    pub region: String,
    /// How the controller logs in: secret, identity or workload. secret: as an application with a client secret.
    /// identity: as the managed identity of the virtual machine in Azure on which the controller runs. workload: as an
    /// application that trusts a token of a Kubernetes cluster, from the file that AZURE_FEDERATED_TOKEN_FILE names
    #[arg(long, value_parser = ConnectionAuth::parse)]
    pub auth: ConnectionAuth,
    /// The client ID of the application; of the managed identity only if the machine has several
    #[arg(long, value_name = "UUID")]
    pub client_id: Option<String>,
    /// The file with the client secret, for --auth secret. The secret is read once, and encrypted in the database
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub secret_file: Option<PathBuf>,
    /// The login service of another cloud than the public one, such as https://login.microsoftonline.us
    /// [default: https://login.microsoftonline.com]
    #[arg(long, value_name = "URL")]
    pub authority: Option<String>,
    /// The management service of another cloud than the public one, such as https://management.usgovcloudapi.net
    /// [default: https://management.azure.com]
    #[arg(long, value_name = "URL")]
    pub management: Option<String>,
}
