# Writes tests/golden/statistics/blocks-r.csv:
# Rscript --vanilla tests/golden/make_blocks.R tests/golden/statistics/blocks-r.csv
#
# Second opinions on the sign test, the interval of the median and Holm's correction, from R's own functions. The test
# that reads them needs no R.

path <- commandArgs(trailingOnly = TRUE)[1]
rows <- list()
add <- function(figure, total, better, ties, confidence, values, place, value)
  rows[[length(rows) + 1]] <<- sprintf("%s,%s,%s,%s,%s,%s,%s,%.17g", figure, total, better, ties, confidence, values,
                                       place, value)

# Ties: the largest p of any way to give them to the two sides.
for (total in c(1, 2, 5, 6, 7, 12, 13, 24, 60))
  for (better in unique(pmin(total, c(0, 1, 2, total %/% 2, total - 2, total - 1, total))))
    for (ties in c(0, 1, 2)) if (better >= 0 && better + ties <= total) {
      p <- max(sapply(0:ties, function(more) binom.test(better + more, total)$p.value))
      add("sign", total, better, ties, "", "", "", p)
    }

# The largest rank whose interval has the confidence, and what it covers; 0 and 0 where there is none.
for (total in c(1:30, 48, 60, 100))
  for (confidence in c(0.9, 0.95, 0.99)) {
    ranks <- seq_len(total %/% 2)
    covered <- 1 - 2 * pbinom(ranks - 1, total, 0.5)
    rank <- max(c(0, ranks[covered >= confidence]))
    add("rank", total, "", "", confidence, "", "", rank)
    add("coverage", total, "", "", confidence, "", "", if (rank == 0) 0 else covered[rank])
  }

for (values in list(c(32), c(32, 64), c(10, 40, 30, 5), c(1, 1, 1), c(900, 20, 20, 500, 1), c(50, 49, 48, 47, 46, 45))) {
  adjusted <- p.adjust(values / 1024, method = "holm")
  for (place in seq_along(values))
    add("holm", "", "", "", "", paste(values, collapse = " "), place, adjusted[place])
}

writeLines(c(paste0("# ", R.version.string, "; stats ", packageVersion("stats"), "; ", Sys.Date()),
             "figure,total,better,ties,confidence,values,place,value", unlist(rows)), path)
