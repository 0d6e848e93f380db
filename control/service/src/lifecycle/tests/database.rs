//! A database that tests steer.

use super::*;

/// A database that can be made to fail.
pub(super) struct FragileDatabase {
    pub(super) inner: SqliteDatabase,
    pub(super) fails: AtomicBool,
    /// How often it did.
    pub(super) failures: AtomicU64,
    /// Its disk is full, and only reading works.
    pub(super) full: AtomicBool,
    /// How many more writes it has room for, where that is set.
    pub(super) room: Mutex<Option<u64>>,
    /// A write waits for its turn while this is set.
    pub(super) writes_wait: AtomicBool,
    pub(super) write_waits: Notify,
    pub(super) write_goes_on: Notify,
    /// It fails as soon as the next write has begun, which does not.
    pub(super) fails_after_write: AtomicBool,
}

impl FragileDatabase {
    /// The database in a file, with the key that all tests have.
    pub(super) async fn open(path: &Path) -> Arc<Self> {
        let inner = SqliteDatabase::open(path).await.unwrap();
        inner.unlock(SecretsKey::new(&[7; SECRETS_KEY_BYTES]).unwrap()).await.unwrap();
        Arc::new(Self {
            inner,
            fails: AtomicBool::default(),
            failures: AtomicU64::default(),
            full: AtomicBool::default(),
            room: Mutex::default(),
            writes_wait: AtomicBool::default(),
            write_waits: Notify::default(),
            write_goes_on: Notify::default(),
            fails_after_write: AtomicBool::default(),
        })
    }

    fn check(&self) -> Result<(), DbError> {
        let failed = || DbError::Unreadable { column: "state", found: "nonsense".to_owned() };
        if !self.fails.load(Ordering::SeqCst) {
            return Ok(());
        }
        self.failures.fetch_add(1, Ordering::SeqCst);
        Err(failed())
    }
}

#[async_trait]
impl Database for FragileDatabase {
    async fn read(&self) -> Result<Box<dyn Repository>, DbError> {
        self.check()?;
        self.inner.read().await
    }

    async fn write(&self) -> Result<Box<dyn Repository>, DbError> {
        self.check()?;
        if self.writes_wait.load(Ordering::SeqCst) {
            self.write_waits.notify_one();
            self.write_goes_on.notified().await;
        }
        let has_room = match &mut *self.room.lock().unwrap() {
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
            None => true,
        };
        if self.full.load(Ordering::SeqCst) || !has_room {
            return Err(DbError::NoSpace("the disk is full".into()));
        }
        if self.fails_after_write.swap(false, Ordering::SeqCst) {
            self.fails.store(true, Ordering::SeqCst);
        }
        self.inner.write().await
    }

    fn revision(&self) -> u64 {
        self.inner.revision()
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}
