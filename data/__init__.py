# SPDX-License-Identifier: Apache-2.0
"""Training data: images and conversations in any known form, opened, checked and mixed.

    file, folder, Hub data set     sources/   raw rows, as they are stored
              |  parse_row         rows/      one form: images, messages, learned
         parsed rows
              |  row checks                   bad rows stop the run or are dropped, like long ones
          valid rows
              |  fractions, held-out share    sources/mixtures.py
        selected rows                         what is trained on

In memory, a cached table has a line for each row, and a row is parsed again when it is read. A
stream parses and checks each row as it comes.
"""
